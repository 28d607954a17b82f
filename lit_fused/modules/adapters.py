"""What is exported of a model with PEFT adapters: a plain model, the adapters merged into its weights.

Merging rounds, and taking a merged adapter out again rounds once more. So it happens on a copy, whose tensors lie in
the CPU's memory, and the model that trains is only read.

A sharded model cannot be copied. Its outline, taken before it was sharded, can; gathered weights fill it.
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
    """A copy of a model without the memory of its parameters, which are on the meta device, shared as they were."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


def filled(outlined: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A copy of an outline with ``weights``, by name, as its parameters and persistent buffers."""
    memo: dict[int, Any] = {id(p): nn.Parameter(weights[n], p.requires_grad) for n, p in outlined.named_parameters()}
    model = copy.deepcopy(outlined, memo)
    kept = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in kept:
            buffer.data = weights[name]
    return model


def merged_copy(model: Any) -> PreTrainedModel:
    """The Hugging Face model inside a ``peft.PeftModel``, copied, with the active adapters merged into its weights.

    Raises whatever PEFT raises for adapters that cannot be merged.
    """
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().cpu().clone(), p.requires_grad) for p in model.parameters()}
    # buffers, and what LoRA layers keep of the adapter that they are tied to
    others = [*model.buffers(), *tree_leaves([vars(module).get("kwargs") for module in model.modules()])]
    memo |= {id(t): t.detach().cpu().clone() for t in others if isinstance(t, Tensor)}
    copied = copy.deepcopy(model, memo)
    _untie_adapted_layers(copied)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's on tied weights: they are not tied any more
        return copied.merge_and_unload(safe_merge=True)


def _untie_adapted_layers(model: nn.Module) -> None:
    """Give each adapted layer a weight of its own: merged into a tied one, the output layer's adapter would act on the
    embedding as well."""
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    adapted = [module.base_layer for module in model.modules() if is_adapter(module) and hasattr(module, "base_layer")]
    for layer in adapted:
        if isinstance(layer, nn.Linear | nn.Embedding) and uses[id(layer.weight)] > 1:
            layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
