"""Merge PEFT adapters into the weights of a copy of the model, for export.

Merging rounds, and taking a merged adapter out again rounds once more. So the model that trains is only read, and the
adapters are merged in a copy in the CPU's memory.

A sharded model cannot be copied. Its outline is taken before it is sharded, and gathered weights fill a copy of that.
"""

import copy
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from lit_fused.heads.adapters import is_adapter


def outline(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters are on the meta device, shared between layers as they were."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


def filled(outlined: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of an outline with ``weights``, by name, as its parameters and persistent buffers."""
    memo: dict[int, Any] = {id(p): nn.Parameter(weights[n], p.requires_grad) for n, p in outlined.named_parameters()}
    model = copy.deepcopy(outlined, memo)
    kept = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in kept:
            buffer.data = weights[name]
    return model


def merged_copy(model: Any) -> PreTrainedModel:
    """Return a copy of the model inside a ``peft.PeftModel``, with the active adapters merged into its weights.

    For adapters that cannot be merged, PEFT raises errors of several kinds.
    """
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().cpu().clone(), p.requires_grad) for p in model.parameters()}
    # LoRA layers refer in kwargs to the adapter that they are tied to.
    others = [*model.buffers(), *tree_leaves([vars(module).get("kwargs") for module in model.modules()])]
    memo |= {id(t): t.detach().cpu().clone() for t in others if isinstance(t, Tensor)}
    copied = copy.deepcopy(model, memo)
    _untie_adapted_layers(copied)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of tied weights, but they are untied by now.
        return copied.merge_and_unload(safe_merge=True)


def _untie_adapted_layers(model: nn.Module) -> None:
    """Give each adapted layer a weight of its own.

    Merged into a tied weight, the output layer's adapter would act on the embedding as well.
    """
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    adapted = [module.base_layer for module in model.modules() if is_adapter(module) and hasattr(module, "base_layer")]
    for layer in adapted:
        if isinstance(layer, nn.Linear | nn.Embedding) and uses[id(layer.weight)] > 1:
            layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
