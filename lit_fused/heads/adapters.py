"""What other libraries wrap around a model or its output layer: ``torch.compile``, and PEFT's adapters.

LoRA on the output layer is exact as one linear layer of a slightly larger hidden size. With rank r and scaling s

    h W^T + s (h A^T) B^T = [h, s h A^T] [W, B]^T

so that a fused loss of the concatenated operands gives the gradients of h, A and B by the chain rule. Dropout acts on
the input of A alone, after everything else that the model draws random numbers for, as it does in PEFT's own forward:
the same generator state gives the same mask.

Rows that PEFT trains alone (``trainable_token_indices``, on an output layer that is tied to the embedding) are written
into a copy of the weight, through which their gradient comes back.

The price is a copy [W, B] per step and, because no backend leaves out columns, a gradient of the frozen W that is
thrown away: two tensors of W's size, and one of three products. Adapters elsewhere cost nothing here.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_fused.errors import UserError


def without_wrappers(backbone: nn.Module) -> nn.Module:
    """The module inside ``torch.compile`` and PEFT's wrappers, which still runs all its adapters."""
    model = peft_model(backbone)
    return without_compilation(backbone if model is None else model.get_base_model())


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


def peft_model(backbone: nn.Module) -> Any:
    """The ``peft.PeftModel`` that ``backbone`` is or that ``torch.compile`` wraps; None for any other module."""
    peft, model = _peft(), without_compilation(backbone)
    return model if peft is not None and isinstance(model, peft.PeftModel) else None


def uses_prompt_learning(backbone: nn.Module) -> bool:
    """Whether PEFT puts virtual tokens before the input (prompt tuning, P-tuning, prefix tuning)."""
    model = peft_model(backbone)
    return model is not None and model.active_peft_config.is_prompt_learning


def trained_copy(layer: Any) -> Any:
    """The active copy of a layer that PEFT trains whole (``modules_to_save``); any other layer as it is."""
    peft = _peft()
    if peft is None or not isinstance(layer, peft.utils.ModulesToSaveWrapper):
        return layer
    active = layer.active_adapters
    if layer.disable_adapters or not active or any(name not in layer.modules_to_save for name in active):
        return layer.original_module
    return layer.modules_to_save[active[0]]


def is_adapter(layer: nn.Module) -> bool:
    """Whether PEFT has put a layer of any kind of its own around another one."""
    peft = _peft()
    kinds = () if peft is None else (peft.tuners.tuners_utils.BaseTunerLayer, peft.utils.other.AuxiliaryTrainingWrapper)
    return isinstance(layer, kinds)


def is_lora(layer: nn.Module) -> bool:
    peft = _peft()
    return peft is not None and isinstance(layer, peft.tuners.lora.Linear)


def trains_tokens(layer: nn.Module) -> bool:
    """Whether PEFT trains some rows of a layer's weight (``trainable_token_indices``)."""
    peft = _peft()
    return peft is not None and isinstance(layer, peft.utils.other.TrainableTokensWrapper)


def weight_with_trained_tokens(layer: Any) -> Tensor:
    """(V, D): a copy of the weight with the rows of the active adapter, where PEFT's own forward would make one."""
    adapter = layer.token_adapter
    if adapter.disable_adapters or not adapter.active_adapters:
        if adapter.merged:
            adapter.unmerge()  # PEFT's forward, which is replaced, would do so
        return adapter.base_layer.weight
    return adapter.base_layer.weight if adapter.merged else adapter.get_merged_weights(adapter.active_adapters)


def why_not_plain_lora(layer: Any) -> str | None:
    """Why a LoRA layer is not the formula above, in words that follow "its output layer"; None if it is."""
    if type(layer).forward is not _peft().tuners.lora.Linear.forward:
        return f"is LoRA of a kind of its own ({full_name(layer)})"
    for name in layer.active_adapters:
        if name in layer.lora_variant:
            variant = type(layer.lora_variant[name]).__name__.removesuffix("LinearVariant")
            return f"has the LoRA variant {variant}, which does more than add a product to the weight"
        if name in layer.lora_A and layer.lora_bias[name]:
            return "has LoRA with a bias of its own (lora_bias=True)"
    return None


def lora_operands(layer: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """``[h, s A h]`` (..., D + ranks) and ``[W, B]`` (V, D + ranks) over the active adapters.

    Both are padded with zeros to a multiple of eight columns, which is what matrix products on a GPU want. Merged or
    disabled adapters leave the layer's own operands, as in PEFT's forward.
    """
    reason = why_not_plain_lora(layer)  # asked at every use: set_adapter() may have chosen another one
    if reason is not None:
        raise UserError(f"the output layer {reason}; choose loss=standard")
    if layer.disable_adapters and layer.merged:
        layer.unmerge()  # PEFT's forward, which is replaced, would do so
    weight = layer.base_layer.weight
    adapters = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or not adapters:
        return hidden_states, weight
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


def full_name(thing: Any) -> str:
    """The class of an object, as it would be imported."""
    return f"{type(thing).__module__}.{type(thing).__name__}"


def _peft() -> Any:
    """The package, if something has imported it: without it nothing can be an object of its classes."""
    return sys.modules.get("peft")
