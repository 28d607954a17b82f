"""How a backbone's layers are executed: compiled, or with Liger's kernels. Neither changes a parameter or its name.

``torch.compile`` of each layer (regional) costs one compilation for all layers that are alike, whatever their number,
and composes with FSDP2, whose gathering of parameters stays outside. Of the whole backbone it can fuse a little more,
and takes many times as long to begin.

Liger's own function puts its kernels on the modules of one model, but on the way also replaces functions of
transformers for the whole process. The trick is to take these back at once, and to give them to the modules of this
model alone: another model in the same process, in a sweep for instance, is not touched.
"""

import inspect
import sys
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy, Strategy
from torch import nn
from transformers import PreTrainedModel

from lit_fused.errors import UserError
from lit_fused.model import LanguageModel
from lit_fused.ops.linear_cross_entropy.backends import compiler_missing
from lit_fused.parallel import PipelineStrategy, blocks, tensor_parallel_mesh

COMPILE = ("none", "regional", "whole")
KERNELS = ("none", "liger")
_ACTIVATIONS = {"swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh",)}


def check_choices(compile: str, kernels: str) -> None:
    """Raises:
    UserError: one of them is no choice.
    """
    for name, value, choices in (("compile", compile, COMPILE), ("kernels", kernels, KERNELS)):
        if value not in choices:
            raise UserError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_compile(model: LanguageModel, how: str, strategy: Strategy) -> None:
    """Raises:
    UserError: the model cannot be compiled so under this strategy, or on this machine.
    """
    if how == "none":
        return
    if isinstance(strategy, PipelineStrategy) or tensor_parallel_mesh(strategy) is not None:
        raise UserError(
            f"compile={how} was never compared under tensor parallelism or a pipeline; choose compile=none, or "
            "strategy=ddp or fsdp2"
        )
    if isinstance(strategy, FSDPStrategy):
        raise UserError(f"compile={how} was never compared under FSDP1; choose strategy=fsdp2, or compile=none")
    if how == "whole" and not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
        raise UserError(
            "compile=whole would be cut at every layer, where FSDP2 gathers its parameters; choose compile=regional"
        )
    if model.is_compiled:
        raise UserError(f"the model is compiled already; leave compile={how} out, or pass it without torch.compile")
    if how == "regional" and not blocks(model.backbone):
        raise UserError(
            f"{type(model.backbone).__name__} has no repeated layers (modules in an nn.ModuleList), which "
            "compile=regional compiles; choose compile=whole"
        )
    missing = compiler_missing(strategy.root_device)
    if missing is not None:
        raise UserError(f"compile={how} needs {missing}; or choose compile=none")


def compile_backbone(model: LanguageModel, how: str) -> None:
    """In place, after a strategy has sharded the model; nothing is compiled before the first batch."""
    for part in {"none": [], "regional": blocks(model.backbone), "whole": [model.backbone]}[how]:
        part.compile()


def check_kernels(model: LanguageModel, strategy: Strategy) -> None:
    """Raises:
    UserError: Liger's kernels cannot run here, or are not for this model.
    """
    inner = model.transformers_model
    otherwise = "choose kernels=none"
    try:
        from liger_kernel.transformers import monkey_patch
    except ImportError as error:
        raise UserError(
            f"kernels=liger needs more ({error}): pip install 'lit-fused[liger]', or {otherwise}"
        ) from error
    known = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    if strategy.root_device.type != "cuda":
        raise UserError(f"kernels=liger are for a CUDA GPU, and this is {strategy.root_device.type}; {otherwise}")
    if isinstance(strategy, PipelineStrategy) or tensor_parallel_mesh(strategy) is not None:
        raise UserError(
            f"kernels=liger were never compared under tensor parallelism or a pipeline; {otherwise}, or strategy=ddp "
            "or fsdp2"
        )
    model_type = None if inner is None else inner.config.model_type
    if inner is None or model_type not in known:
        raise UserError(
            f"Liger has no kernels for {type(inner or model.backbone).__name__} (it has some for "
            f"{', '.join(sorted(known))}); {otherwise}"
        )
    check_activation(inner, known[model_type])


def check_activation(model: PreTrainedModel, apply: Any) -> None:
    """Liger's gated MLPs compute one activation each, whatever the configuration has.

    Raises:
        UserError: it has another one.
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
    """Norms, rotary embeddings and gated MLPs of this one model, with or without its weights, compute in Liger's
    kernels; its loss stays as it is.

    Args:
        model: of a type that Liger knows.
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
            # one for all layers: torch.compile leaves what it made of a function among its globals
            replaced.setdefault(own, _with_globals(own, names))
            part.forward = MethodType(replaced[own], part)


def _modeling_modules(model: nn.Module) -> list[ModuleType]:
    """Of transformers, in which the classes of the model's modules are."""
    names = {type(module).__module__ for module in model.modules()}
    return [sys.modules[name] for name in sorted(names) if name.startswith("transformers.models.")]


def _classes(room: ModuleType) -> Iterator[type]:
    return (value for value in vars(room).values() if inspect.isclass(value) and value.__module__ == room.__name__)


def _taken_back(owner: ModuleType | type, old: dict[str, Any]) -> dict[str, Any]:
    """The functions that have been replaced since, by name; everything is as it was again."""
    new = {name: value for name, value in vars(owner).items() if name in old and value is not old[name]}
    for name in new:
        setattr(owner, name, old[name])
    return {name: value for name, value in new.items() if inspect.isfunction(value)}


def _with_globals(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    """The same code, which finds other functions under these names."""
    names = {**function.__globals__, **names}
    del names["__name__"]  # torch.compile would look for globals in the module of that name
    code = function.__code__.replace()  # another object, for which torch.compile makes something of its own
    made = FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    made.__module__, made.__kwdefaults__ = function.__module__, function.__kwdefaults__
    return made
