"""Build a small twin of a model, to try a division on it before the model itself has any numbers.

Whether a division over ranks is exact does not depend on the number of layers or vocabulary entries. So the twin has
few layers, at least one of each kind, and a small vocabulary. Its numbers are noise: no gain is one and no bias zero.

The model may have been changed since it was built. So its classes, settings, shapes and hooks must equal those of a new
model of its configuration, and each of its layers must equal one of the twin's; otherwise there is no twin.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as transformers_initialization

from lit_fused.errors import UserError
from lit_fused.weights.rules import named_tensors, ordinary_defaults

_VOCABULARY = 211  # a prime: no number of ranks divides it
_SETTING = bool | int | float | str | None
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def exact_on_twin(
    model: PreTrainedModel, layers: int, device: torch.device, compare: Callable[[PreTrainedModel], None]
) -> bool:
    """Return whether ``compare``, which raises a UserError for a wrong division, has passed on a model's twin. Without
    a twin that runs, warn and return False: the whole model will tell."""
    from lightning.pytorch.utilities import rank_zero_warn  # Lightning loads matplotlib.

    try:
        compare(twin_of(model, layers, device))
    except UserError:
        raise
    except Exception as error:  # any exception of the model's code for other sizes
        reason = f"{error}" if isinstance(error, _NoTwinError) else f"{type(error).__name__}: {error}"
        rank_zero_warn(
            f"{type(model).__name__} has no small twin on which its division could be tried ({reason}), so every rank "
            "builds it whole before it keeps its part, and needs the memory for that"
        )
        return False
    return True


class _NoTwinError(Exception):
    """Says why a model has no twin."""


def twin_of(model: PreTrainedModel, layers: int, device: torch.device) -> PreTrainedModel:
    """Return a model of about ``layers`` layers on ``device``, the same on every rank, float32 unless flash attention
    needs the model's half precision."""
    text = model.config.get_text_config()
    whole = getattr(text, "num_hidden_layers", None)
    if not isinstance(whole, int) or not isinstance(getattr(text, "vocab_size", None), int):
        raise _NoTwinError("its configuration has no num_hidden_layers or vocab_size")
    if any(not tensor.is_meta for _, tensor in named_tensors(model)):
        raise _NoTwinError("some of its tensors have numbers already")
    with torch.device("meta"), transformers_initialization.meta_device_safe_creation_ops():
        new = _new_model(model, copy.deepcopy(model.config), model.dtype)
    ours, theirs = dict(_facts(model)), dict(_facts(new))
    for name in ours | theirs:
        if ours.get(name, _NoTwinError) != theirs.get(name, _NoTwinError):
            raise _NoTwinError(f"{name or type(model).__name__} is another one in a new model of its configuration")
    if [name for name, _ in model.named_parameters()] != [name for name, _ in new.named_parameters()]:
        raise _NoTwinError("a new model of its configuration ties other weights")
    of_layers = _facts_of_layers(model, whole)
    kinds = [index for index, facts in enumerate(of_layers) if facts not in of_layers[:index]]  # the first of each
    others = [index for index in range(whole) if index not in kinds]
    kept = sorted(kinds + others[: max(layers - len(kinds), 0)])

    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == whole:
            setattr(text, name, type(value)(value[index] for index in kept))
    text.num_hidden_layers, text.vocab_size = len(kept), _VOCABULARY
    if isinstance(text.pad_token_id, int):
        text.pad_token_id %= _VOCABULARY

    flash = "flash" in str(config._attn_implementation)
    with ordinary_defaults(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        twin = _new_model(model, config, model.dtype if flash else torch.float32)
        for p in twin.parameters():
            noise = torch.randn(p.shape, dtype=torch.float32)
            p.copy_(noise / p.shape[-1] ** 0.5 if p.ndim > 1 else p + 0.1 * noise)
    of_twin = _facts_of_layers(twin, len(kept))
    for index, facts in enumerate(of_layers):
        if facts not in of_twin:
            raise _NoTwinError(f"layer {index} is like no layer of a smaller model")
    nn.Module.to(twin, device)
    return twin.train(model.training)


def _new_model(model: PreTrainedModel, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    return type(model)._from_config(config, dtype=dtype, attn_implementation=config._attn_implementation)


def _facts_of_layers(model: nn.Module, layers: int) -> list[dict[str, Any]]:
    """Return, for each layer, the facts that decide how it computes, without its number."""
    lists: list[str] = []  # the outermost with a module for each layer
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, nn.ModuleList) and len(module) == layers and not inside:
            lists.append(name)
    if not lists:
        raise _NoTwinError("it has no list of its layers")
    found = [
        {f"{name}: {fact}": value for name in lists for fact, value in _facts(model.get_submodule(f"{name}.{i}"))}
        for i in range(layers)
    ]

    def is_number(fact: str) -> bool:
        of_layers = [(i, facts[fact]) for i, facts in enumerate(found) if fact in facts]
        return layers > 1 and all(type(value) is int and value == i for i, value in of_layers)

    numbers = {fact for fact in set().union(*found) if is_number(fact)}
    return [{fact: value for fact, value in facts.items() if fact not in numbers} for facts in found]


def _facts(module: nn.Module) -> Iterable[tuple[str, Any]]:
    for name, part in module.named_modules():
        yield name, type(part)
        hooks = [hook for kind in _HOOKS for hook in vars(part)[kind].values()]
        # transformers' own hooks, for checkpointed activations, do not change numbers.
        yield f"{name} hooks", [h for h in hooks if not getattr(h, "__module__", "").startswith("transformers.")]
        for attribute, value in vars(part).items():
            if attribute.startswith("_") or attribute in ("training", "gradient_checkpointing"):  # modes
                continue
            if isinstance(value, _SETTING):
                yield f"{name}.{attribute}", value
            elif callable(value):
                yield f"{name}.{attribute}", getattr(value, "__qualname__", type(value))
        for tensors in (part._parameters, part._buffers):
            for attribute, tensor in tensors.items():
                yield f"{name}.{attribute}", None if tensor is None else tuple(tensor.shape)
