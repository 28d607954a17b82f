"""Run the layers of one model in Liger's kernels. No parameter and no name of one changes.

Liger's own function also replaces functions of transformers for the whole process. ``use_liger_kernels`` takes these
back at once and gives them to the modules of this model alone: others, in a sweep for instance, are not touched.
"""

import inspect
import sys
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from transformers import PreTrainedModel

from lit_fused.errors import UserError, needing
from lit_fused.models.language_model import LanguageModel

_ACTIVATIONS = {"swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh",)}


def check_kernels(model: LanguageModel, kernels: str, device: torch.device) -> None:
    """Raise UserError if Liger's kernels are not installed, not for this device, or not for this model."""
    if kernels != "liger":
        return
    with needing("kernels=liger", "liger"):
        from liger_kernel.transformers import monkey_patch
    known = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    if device.type != "cuda":
        raise UserError(f"kernels=liger are for a CUDA GPU, and this is {device.type}; choose kernels=none")
    inner = model.transformers_model
    name, model_type = type(inner or model.backbone).__name__, None if inner is None else inner.config.model_type
    if inner is None or model_type not in known:
        raise UserError(f"Liger has no kernels for {name} (only for {', '.join(sorted(known))}); choose kernels=none")
    text = inner.config.get_text_config()
    activation = getattr(text, "hidden_activation", None) or getattr(text, "hidden_act", None)
    for gate, right in _ACTIVATIONS.items():  # the gated MLP computes this one whatever the configuration says
        if gate in inspect.signature(known[model_type]).parameters and activation not in right:
            raise UserError(
                f"{name} has the activation {activation}, for which Liger's kernels would compute {right[0]}; choose "
                "kernels=none"
            )


def use_liger_kernels(model: PreTrainedModel, **parts: bool) -> None:
    """Run the norms, rotary embeddings and gated MLPs of this one model, which may have no weights yet, in Liger's
    kernels. ``parts`` are Liger's own switches (``rms_norm=False``)."""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    modules = sorted({type(module).__module__ for module in model.modules()})
    rooms = [sys.modules[name] for name in modules if name.startswith("transformers.models.")]
    before = {owner: dict(vars(owner)) for room in rooms for owner in (room, *_classes(room))}
    try:
        _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False, **parts)
    finally:
        changed = {owner: _taken_back(owner, old) for owner, old in before.items()}
    replaced: dict[FunctionType, FunctionType] = {}  # all layers share one copy: compiled code is stored in its globals
    for part in list(model.modules()):
        forward = changed.get(type(part), {}).get("forward")
        if forward is not None and "forward" not in vars(part):
            part.forward = MethodType(forward, part)
        own = getattr(part.forward, "__func__", None)
        room = sys.modules[type(part).__module__]
        names = changed.get(room, {})
        if isinstance(own, FunctionType) and own.__globals__ is vars(room) and names.keys() & {*own.__code__.co_names}:
            replaced.setdefault(own, _with_globals(own, names))
            part.forward = MethodType(replaced[own], part)


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
