"""A small model of the same architecture, on which a division is tried before the large one has any numbers.

Whether a division over ranks is exact depends on the architecture and its configuration, not on how many layers or
entries of the vocabulary there are. So the twin has few layers, one of each kind at least, and a small vocabulary; its
other sizes are the model's. Its numbers are noise, so that no gain is one and no bias zero.

Somebody may have changed the model since it was built. So module by module its classes, settings, shapes and hooks have
to be those of the twin, and each of its layers like one of the twin's; else there is no twin.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_fused.precision import ordinary_defaults

_VOCABULARY = 211  # a prime: no number of ranks divides it
_SETTING = bool | int | float | str | None
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def twin_of(model: PreTrainedModel, layers: int, device: torch.device) -> PreTrainedModel | None:
    """A model of ``layers`` layers or a few more, float32 and on ``device``, the same on every rank; None, with a
    warning, where there is no such model.

    It is in half precision, as the model is, where flash attention wants that.
    """
    try:
        twin = _twin_of(model, layers)
        nn.Module.to(twin, device)
        return twin
    except Exception as error:  # whatever a model's own code raises for other sizes
        no_twin(model, error)
        return None


def no_twin(model: nn.Module, error: Exception) -> None:
    """Announce that the whole model takes the place of its twin."""
    reason = f"{error}" if isinstance(error, _NoTwinError) else f"{type(error).__name__}: {error}"
    rank_zero_warn(
        f"{type(model).__name__} has no small twin on which its division could be tried ({reason}), so every rank "
        "builds it whole before it keeps its part, and needs the memory for that"
    )


class _NoTwinError(Exception):
    """Why there is none."""


def _twin_of(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    text = model.config.get_text_config()
    whole, vocabulary = getattr(text, "num_hidden_layers", None), getattr(text, "vocab_size", None)
    if not isinstance(whole, int) or not isinstance(vocabulary, int):
        raise _NoTwinError("its configuration has no num_hidden_layers or vocab_size")
    of_layers = _facts_of_layers(model, whole)
    kept = _one_of_each_kind(of_layers, layers)

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
        twin = type(model)._from_config(
            config,
            dtype=model.dtype if flash else torch.float32,
            attn_implementation=config._attn_implementation,
        )
        for p in twin.parameters():
            noise = torch.randn(p.shape, dtype=torch.float32)
            p.copy_(noise / p.shape[-1] ** 0.5 if p.ndim > 1 else p + 0.1 * noise)
    _check_alike(model, twin, of_layers, (whole, len(kept)), (vocabulary, _VOCABULARY))
    return twin.train(model.training)


def _lists_of_layers(model: nn.Module, layers: int) -> list[str]:
    """Names of the lists that have a module for each layer, but of none inside of another one's."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) == layers and not inside:
            found.append(name)
    if not found:
        raise _NoTwinError("it has no list of its layers")
    return found


def _facts_of_layers(model: nn.Module, layers: int) -> list[dict[str, Any]]:
    """What decides how each layer computes, but for its number."""
    lists = _lists_of_layers(model, layers)
    found = [
        {f"{name}: {fact}": value for name in lists for fact, value in _facts(model.get_submodule(f"{name}.{i}"))}
        for i in range(layers)
    ]
    names = {fact for facts in found for fact in facts}
    numbers = {n for n in names if layers > 1 and all(type(f[n]) is int and f[n] == i for i, f in _having(found, n))}
    return [{name: value for name, value in facts.items() if name not in numbers} for facts in found]


def _having(found: list[dict[str, Any]], name: str) -> Iterable[tuple[int, dict[str, Any]]]:
    return ((index, facts) for index, facts in enumerate(found) if name in facts)


def _facts(module: nn.Module) -> Iterable[tuple[str, Any]]:
    for name, part in module.named_modules():
        yield name, type(part)
        hooks = [hook for kind in _HOOKS for hook in vars(part)[kind].values()]
        # transformers' own, for checkpointed activations, does nothing to numbers
        yield f"{name} hooks", [h for h in hooks if not getattr(h, "__module__", "").startswith("transformers.")]
        for attribute, value in vars(part).items():
            if attribute.startswith("_") or attribute in ("training", "gradient_checkpointing"):  # off when compared
                continue
            if isinstance(value, _SETTING):
                yield f"{name}.{attribute}", value
            elif callable(value):
                yield f"{name}.{attribute}", getattr(value, "__qualname__", type(value))
        for tensors in (part._parameters, part._buffers):
            for attribute, tensor in tensors.items():
                yield f"{name}.{attribute}", None if tensor is None else tuple(tensor.shape)


def _one_of_each_kind(of_layers: list[dict[str, Any]], layers: int) -> list[int]:
    """As many layers as asked for, if there are, and the first of each kind."""
    kinds = [index for index, facts in enumerate(of_layers) if facts not in of_layers[:index]]
    others = [index for index in range(len(of_layers)) if index not in kinds]
    return sorted(kinds + others[: max(layers - len(kinds), 0)])


def _check_alike(
    model: PreTrainedModel,
    twin: PreTrainedModel,
    of_layers: list[dict[str, Any]],
    layers: tuple[int, int],
    vocabulary: tuple[int, int],
) -> None:
    lists = _lists_of_layers(model, layers[0])
    if _lists_of_layers(twin, layers[1]) != lists:
        raise _NoTwinError("with fewer layers it has other lists of them")
    of_twin = _facts_of_layers(twin, layers[1])
    for index, facts in enumerate(of_layers):
        if facts not in of_twin:
            raise _NoTwinError(f"layer {index} is like no layer of a smaller model")
    tables = (model.get_input_embeddings(), twin.get_input_embeddings())
    pairs = [layers, vocabulary, tuple(getattr(table, "padding_idx", None) for table in tables)]

    def beside_layers(whole: nn.Module) -> dict[str, Any]:
        return {n: v for n, v in _facts(whole) if not any(n.startswith(f"{name}.") for name in lists)}

    ours, theirs = beside_layers(model), beside_layers(twin)
    for name in ours.keys() | theirs.keys():
        pair = ours.get(name, _NoTwinError), theirs.get(name, _NoTwinError)
        if not _alike(pair, pairs):
            raise _NoTwinError(f"{name or type(model).__name__} is another one in a smaller model")
    tied = [_names_of(table.weight, whole) for table, whole in zip(tables, (model, twin), strict=True)]
    if tied[0] != tied[1]:
        raise _NoTwinError("a smaller model ties other weights")


def _alike(values: tuple[Any, Any], pairs: list[tuple[Any, ...]]) -> bool:
    ours, theirs = values
    if isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        return all(_alike(sizes, pairs) for sizes in zip(ours, theirs, strict=True))
    return ours == theirs or values in pairs


def _names_of(tensor: Any, model: nn.Module) -> list[str]:
    assert isinstance(tensor, Tensor)
    return [name for name, p in model.named_parameters(remove_duplicate=False) if p is tensor]
