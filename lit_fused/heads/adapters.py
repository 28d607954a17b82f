"""What other libraries wrap around a model or its output layer: ``torch.compile``, and PEFT's adapters.

LoRA on the output layer is exact as one linear layer of a slightly larger hidden size. With rank r and scaling s

    h W^T + s (h A^T) B^T = [h, s h A^T] [W, B]^T

so that a fused loss of the concatenated operands gives the gradients of h, A and B by the chain rule. Dropout acts on
the input of A alone, as it does in PEFT's own forward.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def without_wrappers(backbone: nn.Module) -> nn.Module:
    """The module inside ``torch.compile`` and PEFT's wrappers, which still runs all its adapters."""
    backbone = without_compilation(backbone)
    return without_compilation(backbone.get_base_model()) if is_peft_model(backbone) else backbone  # type: ignore[operator]


def transformers_model(backbone: nn.Module) -> PreTrainedModel | None:
    """The Hugging Face model that ``backbone`` is or wraps; None for any other module."""
    inner = without_wrappers(backbone)
    return inner if isinstance(inner, PreTrainedModel) else None


def is_compiled(backbone: nn.Module) -> bool:
    """Whether it is what ``torch.compile(module)`` returns; a module compiled in place is no wrapper."""
    return isinstance(backbone, torch._dynamo.eval_frame.OptimizedModule)


def without_compilation(backbone: nn.Module) -> nn.Module:
    """The module inside ``torch.compile``'s wrapper."""
    return backbone._orig_mod if is_compiled(backbone) else backbone  # type: ignore[return-value]


def is_peft_model(backbone: nn.Module) -> bool:
    peft = _peft()
    return peft is not None and isinstance(backbone, peft.PeftModel)


def uses_prompt_learning(backbone: nn.Module) -> bool:
    """Whether PEFT puts virtual tokens before the input (prompt tuning, P-tuning, prefix tuning)."""
    backbone = without_compilation(backbone)
    return is_peft_model(backbone) and backbone.active_peft_config.is_prompt_learning  # type: ignore[union-attr]


def trained_copy(layer: Any) -> Any:
    """The active copy of a layer that PEFT trains whole (``modules_to_save``); any other layer as it is."""
    peft = _peft()
    if peft is None or not isinstance(layer, peft.utils.ModulesToSaveWrapper):
        return layer
    if layer.disable_adapters:
        return layer.original_module
    return layer.modules_to_save[layer.active_adapters[0]]


def is_lora(layer: nn.Module) -> bool:
    peft = _peft()
    return peft is not None and isinstance(layer, peft.tuners.lora.Linear)


def why_not_plain_lora(layer: Any) -> str | None:
    """Why a LoRA layer is not the formula above, in words that follow "its output layer"; None if it is."""
    if type(layer.get_base_layer()).forward is not nn.Linear.forward:
        return f"is LoRA around a {type(layer.get_base_layer()).__name__}, not around a plain linear layer"
    if layer.merged:
        return "has its LoRA merged into the weight, where it cannot be trained (unmerge_adapter() first)"
    if layer.disable_adapters:
        return "has its LoRA disabled (enable_adapter_layers() first)"
    for name in layer.active_adapters:
        if name in layer.lora_variant:
            return f"has the LoRA variant {type(layer.lora_variant[name]).__name__}, which is not linear in the weight"
        if name in layer.lora_A and layer.lora_bias[name]:
            return "has LoRA with a bias of its own (lora_bias=True)"
    return None


def lora_operands(layer: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """``[h, s A h]`` (..., D + ranks) and ``[W, B]`` (V, D + ranks) over the active adapters.

    Both are padded with zeros to a multiple of eight columns, which is what matrix products on a GPU want.
    """
    adapters = [name for name in layer.active_adapters if name in layer.lora_A]
    weight = layer.get_base_layer().weight
    features, weights = [hidden_states], [weight]
    for name in adapters:
        down, up = layer.lora_A[name], layer.lora_B[name]
        dropped = layer.lora_dropout[name](hidden_states.to(down.weight.dtype))
        features.append((down(dropped) * layer.scaling[name]).to(hidden_states.dtype))
        weights.append(up.weight.to(weight.dtype))
    padding = -sum(w.shape[1] for w in weights) % 8
    if padding:
        features.append(hidden_states.new_zeros(*hidden_states.shape[:-1], padding))
        weights.append(weight.new_zeros(len(weight), padding))
    return torch.cat(features, -1), torch.cat(weights, -1)


def _peft() -> Any:
    """The package, if something has imported it: without it nothing can be an object of its classes."""
    return sys.modules.get("peft")
