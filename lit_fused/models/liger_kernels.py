"""Run the layers of one model in Liger's kernels. No parameter and no name of one changes.

Liger's own function replaces the forward methods of one model's modules, but it also replaces functions of transformers
for the whole process. ``use_liger_kernels`` takes these back at once and gives them to the modules of this model alone.
Other models in the same process, in a sweep for instance, are not touched.
"""

import inspect
import sys
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lit_fused.errors import UserError
from lit_fused.models.language_model import LanguageModel

_ACTIVATIONS = {"swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh",)}


def check_kernels(model: LanguageModel, kernels: str, device: torch.device) -> None:
    """Refuse Liger's kernels where they cannot run.

    Raises:
        UserError: they are not installed, not for this device, or not for this model.
    """
    if kernels == "none":
        return
    inner = model.transformers_model
    otherwise = "choose kernels=none"
    try:
        from liger_kernel.transformers import monkey_patch
    except ImportError as error:
        raise UserError(
            f"kernels=liger needs more ({error}): pip install 'lit-fused[liger]', or {otherwise}"
        ) from error
    known = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    if device.type != "cuda":
        raise UserError(f"kernels=liger are for a CUDA GPU, and this is {device.type}; {otherwise}")
    model_type = None if inner is None else inner.config.model_type
    if inner is None or model_type not in known:
        raise UserError(
            f"Liger has no kernels for {type(inner or model.backbone).__name__} (it has some for "
            f"{', '.join(sorted(known))}); {otherwise}"
        )
    check_activation(inner, known[model_type])


def check_activation(model: PreTrainedModel, apply: Any) -> None:
    """Refuse a model whose activation differs from the one that Liger's gated MLP always computes.

    Raises:
        UserError: with both activations.
    """
    text = model.config.get_text_config()
    activation = getattr(text, "hidden_activation", None) or getattr(text, "hidden_act", None)
    for gate, right in _ACTIVATIONS.items():
        if gate in inspect.signature(apply).parameters and activation not in right:
            raise UserError(
                f"{type(model).__name__} has the activation {activation}, for which Liger's kernels would compute "
                f"{right[0]}; choose kernels=none"
            )


def use_liger_kernels(model: PreTrainedModel, **parts: bool) -> None:
    """Run the norms, rotary embeddings and gated MLPs of this one model in Liger's kernels. The loss does not change.

    Args:
        model: a model of a type that Liger knows, with or without its weights.
        parts: Liger's own switches (``rms_norm=False``).
    """
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    rooms = _modeling_modules(model)
    before = {owner: dict(vars(owner)) for room in rooms for owner in (room, *_classes(room))}
    try:
        _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False, **parts)
    finally:
        changed = {owner: _taken_back(owner, old) for owner, old in before.items()}
    replaced: dict[FunctionType, FunctionType] = {}
    for part in list(model.modules()):
        forward = changed.get(type(part), {}).get("forward")
        if forward is not None and "forward" not in vars(part):
            part.forward = MethodType(forward, part)
        own = getattr(part.forward, "__func__", None)
        room = sys.modules[type(part).__module__]
        names = changed.get(room, {})
        if isinstance(own, FunctionType) and own.__globals__ is vars(room) and names.keys() & {*own.__code__.co_names}:
            # All layers share one copy, because torch.compile stores compiled code in the function's globals.
            replaced.setdefault(own, _with_globals(own, names))
            part.forward = MethodType(replaced[own], part)


def _modeling_modules(model: nn.Module) -> list[ModuleType]:
    """Return the transformers modules that define the classes of the model's parts."""
    names = {type(module).__module__ for module in model.modules()}
    return [sys.modules[name] for name in sorted(names) if name.startswith("transformers.models.")]


def _classes(room: ModuleType) -> Iterator[type]:
    return (value for value in vars(room).values() if inspect.isclass(value) and value.__module__ == room.__name__)


def _taken_back(owner: ModuleType | type, old: dict[str, Any]) -> dict[str, Any]:
    """Restore the old values of an owner's names, and return the functions that had replaced them, by name."""
    new = {name: value for name, value in vars(owner).items() if name in old and value is not old[name]}
    for name in new:
        setattr(owner, name, old[name])
    return {name: value for name, value in new.items() if inspect.isfunction(value)}


def _with_globals(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    """Return a copy of a function that finds other values under these global names."""
    names = {**function.__globals__, **names}
    del names["__name__"]  # torch.compile would look for globals in the module of that name.
    code = function.__code__.replace()  # torch.compile caches by code object, so the copy needs its own.
    made = FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    made.__module__, made.__kwdefaults__ = function.__module__, function.__kwdefaults__
    return made
