"""Write a model as a folder that transformers' ``from_pretrained`` loads, with PEFT's adapters merged into it.

Merging rounds, and taking a merged adapter out again rounds once more. So the model that trains is only read, and the
adapters are merged in a copy in the CPU's memory. A sharded model cannot be copied. Its outline is taken before it is
sharded, and gathered weights fill a copy of that.
"""

import copy
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from lit_fused.atomic import written_whole
from lit_fused.export.own_folder import check_own, finish_own
from lit_fused.heads import peft_model, transformers_model
from lit_fused.heads.adapters import is_adapter
from lit_fused.models.generation import generation_config


def write_folder(
    folder: Path,
    backbone: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    weights: Mapping[str, Tensor] | None,
    outlined: nn.Module | None = None,
    card: str | None = None,
) -> None:
    """Write a transformers model, or PEFT's wrapper around one, with the tokenizer, as ``save_pretrained`` says.
    ``weights`` are by name, whole and on the CPU; None for its own. ``outlined`` is its outline with adapters, from
    before it was sharded."""
    model, adapted = transformers_model(backbone), peft_model(backbone)
    assert model is not None
    check_own(folder)
    if not sys.stderr.isatty():  # "Writing model shards" would stay in a file or a pipe
        disable_progress_bar()
    with written_whole(folder) as partial:
        if adapted is None:
            model.save_pretrained(partial, state_dict=None if weights is None else dict(weights))
        else:
            if weights is not None:
                adapted = peft_model(_filled(outline(backbone) if outlined is None else outlined, weights))
            assert adapted is not None
            _write_adapted(adapted, partial, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
            if model.can_generate():
                generation_config(model, tokenizer).save_pretrained(partial)
        if card is not None:
            (partial / "README.md").write_text(card, encoding="utf-8")
        finish_own(partial)


def _write_adapted(adapted: Any, partial: Path, folder: Path) -> None:
    adapted.save_pretrained(partial / "adapter")
    try:
        merged = _merged_copy(adapted)
    except Exception as error:  # PEFT raises many kinds; the trained numbers are in the adapter
        fault = f"the adapters could not be merged into the weights ({type(error).__name__}: {error})"
        warnings.warn(f"{fault}; {folder} holds only the folder adapter, for PeftModel.from_pretrained", stacklevel=2)
    else:
        merged.save_pretrained(partial)


def outline(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters are on the meta device, shared between layers as they were."""
    empty = {p: torch.empty_like(p, device="meta") for p in model.parameters()}
    return copy.deepcopy(model, {id(p): nn.Parameter(meta, p.requires_grad) for p, meta in empty.items()})


def _filled(outlined: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of an outline with ``weights``, by name, as its parameters and persistent buffers."""
    memo: dict[int, Any] = {id(p): nn.Parameter(weights[n], p.requires_grad) for n, p in outlined.named_parameters()}
    model = copy.deepcopy(outlined, memo)
    kept = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in kept:
            buffer.data = weights[name]
    return model


def _merged_copy(model: Any) -> PreTrainedModel:
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().cpu().clone(), p.requires_grad) for p in model.parameters()}
    # LoRA layers refer in kwargs, a dict, to the weights of the adapter that they are tied to.
    others = [*model.buffers(), *_tensors([vars(module).get("kwargs") for module in model.modules()])]
    memo |= {id(t): t.detach().cpu().clone() for t in others}
    copied = copy.deepcopy(model, memo)
    # Each adapted layer gets a weight of its own: merged into a tied one, its adapter would act on the embedding too.
    uses = Counter(id(p) for module in copied.modules() for p in module.parameters(recurse=False))
    for layer in [m.base_layer for m in copied.modules() if is_adapter(m) and hasattr(m, "base_layer")]:
        if isinstance(layer, nn.Linear | nn.Embedding) and uses[id(layer.weight)] > 1:
            layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of tied weights, but they are untied by now.
        merged = copied.merge_and_unload(safe_merge=True)
    stored, tied = merged.state_dict(), getattr(merged.config, "tie_word_embeddings", True)  # PEFT may set it to False
    if not tied or any(stored[t].data_ptr() != stored[s].data_ptr() for t, s in merged.all_tied_weights_keys.items()):
        _untie(merged)
    return merged


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, in lists and in dicts."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict | list | tuple):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _tensors(value)


def _untie(model: PreTrainedModel) -> None:
    """Give each layer a weight of its own, to be written: whoever reads the folder ties none, or only equal ones."""
    model.config.tie_word_embeddings = False
    seen = set[nn.Parameter]()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
            seen.add(parameter)
