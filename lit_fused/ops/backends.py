"""Backends: functions that compute the loss, ours and other people's, found by name.

A backend is a function ``f(hidden_ND, weight_VD, targets_N, *, ...)`` that returns the *summed* loss over the valid
targets, or that and a dictionary of summed statistics. It supports the options that its signature names: ``bias`` and
fields of ``LossOptions`` (``reduction``, "sum" or "none", only if it can be "none"), and ``shard`` where it takes a
rank's part of a divided vocabulary. Inputs arrive checked and flat; targets of -100 are ignored. ``chunked`` and the
functions of ``foreign`` are found by their names, any other by its dotted path, or is passed itself.

A backend may have attributes: ``options`` are those that its ``**options`` take, ``statistics`` the names of sums over
tokens that it returns in training and that are logged as means, ``builds_logits`` says that it builds all of them,
``approximate_backward`` that its gradients are not those of the exact loss by intention, ``requirement`` says what is
missing on a device, ``fallback`` is what stands in, and needs nothing.

N tokens, D hidden, V vocabulary.
"""

import functools
import importlib
import inspect
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from .cross_entropy import loss_of
from .kernel_path import HeadCall
from .options import LossOptions
from .user_error import UserError
from .vocabulary_parallel import VocabularyShard

Backend = Callable[..., Tensor | tuple[Tensor, dict[str, Tensor]]]
Requirement = Callable[[torch.device], str | None]  # returns what is missing on this device, or None
_OPERANDS = ["hidden_states", "weight", "targets"]


def chunked(
    hidden_states: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    shard: VocabularyShard | None = None,
    token_weights: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Our own exact head: :func:`lit_fused.ops.linear_cross_entropy`."""
    checked = LossOptions(**{"reduction": "sum", **options})
    call = HeadCall.here(checked, hidden_states, weight, bias, shard=shard, checked=True)
    return loss_of(hidden_states, weight, bias, targets, token_weights, call)


chunked.options = {field.name for field in fields(LossOptions)}  # type: ignore[attr-defined]
chunked.takes_frozen_columns = True  # type: ignore[attr-defined]


def usable_backend(backend: Backend, device: torch.device) -> Backend:
    """Return the backend itself, or with one warning its stand-in, which always runs; UserError without one."""
    requirement: Requirement | None = backend_attribute(backend, "requirement")
    missing, stand_in = requirement and requirement(device), backend_attribute(backend, "fallback")
    if missing is None:
        return backend
    name = backend_name(backend)
    if stand_in is None:
        raise UserError(f"loss={name} cannot run here: it needs {missing}; choose loss=chunked, which always runs")
    warnings.warn(f"loss={name} needs {missing}; this run uses {backend_name(stand_in)} instead", stacklevel=2)
    return stand_in


def backend_by_name(name: str) -> Backend:
    """Return ``chunked`` (also "auto", "pytorch"), a backend of ``foreign`` by name, or any by its dotted path."""
    if "." in name:
        module, _, attribute = name.rpartition(".")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UserError(f"impl={name!r} cannot be imported: {error}") from error
    from . import foreign

    known = dict.fromkeys(("chunked", "auto", "pytorch"), chunked) | {
        name: function
        for name, function in vars(foreign).items()
        if inspect.isfunction(function)
        and function.__module__ == foreign.__name__
        and list(inspect.signature(function).parameters)[:3] == _OPERANDS
    }
    if name not in known:
        raise UserError(
            f"impl={name!r} is unknown; choose one of {', '.join(known)}, or name a function by its dotted path"
        )
    return known[name]


@functools.lru_cache(maxsize=64)
def supported_options(backend: Backend) -> set[str]:
    """Return the options that a backend's signature names, and those that it says its ``**options`` are."""
    parameters = inspect.signature(backend).parameters
    named = {name for name, parameter in parameters.items() if parameter.kind is not inspect.Parameter.VAR_KEYWORD}
    return (named | (backend_attribute(backend, "options") or set())) - set(_OPERANDS)


def backend_name(backend: Backend) -> str:
    return backend_attribute(backend, "__name__") or backend_attribute(backend, "__class__").__name__


def backend_attribute(backend: Backend, name: str) -> Any:
    """Return an attribute of a backend, also of one in a partial; or None."""
    while isinstance(backend, functools.partial):
        backend = backend.func
    return getattr(backend, name, None)


def compiler_missing(device: torch.device) -> str | None:
    """Return what ``torch.compile`` lacks on a device; None if it has everything."""
    if device.type == "cuda":
        return package_missing("triton")
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # torch's own choice
    return None if shutil.which(compiler) else "a C++ compiler for torch.compile on the CPU (install g++)"


def package_missing(package: str) -> str | None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        return f"the package {package} ({error})"
    return None


def cuda_missing(device: torch.device, capability: tuple[int, int]) -> str | None:
    wanted = f"a CUDA GPU of compute capability {capability[0]}.{capability[1]}"
    if device.type != "cuda":
        return f"{wanted} (this run is on {device.type})"
    found = torch.cuda.get_device_capability(device)
    return None if found >= capability else f"{wanted} (this one has {found[0]}.{found[1]})"
