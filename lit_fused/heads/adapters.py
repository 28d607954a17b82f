"""Look through what other libraries wrap around a model or its output layer: ``torch.compile`` and PEFT.

LoRA on the output layer equals one linear layer of a slightly larger hidden size. With rank r and scaling s

    h W^T + s (h A^T) B^T = [h, s h A^T] [W, B]^T

so a fused loss of the concatenated operands gives the gradients of h, A and B by the chain rule. Dropout acts on the
input of A alone and is the last random operation of the forward, as in PEFT: the same generator state gives the same
mask. Our own operators read the frozen W where it is, and compute no gradient of it; for other backends [W, B] is
copied. Adapters on other layers cost nothing here.

If PEFT trains some rows (``trainable_token_indices``, on an output layer tied to the embedding), they are written into
a copy of the weight, which passes their gradient on.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_fused.errors import UserError
from lit_fused.heads.quantised import is_instance, loaded_classes, weight_of
from lit_fused.ops.frozen_columns import FrozenColumns, frozen_columns, with_frozen_columns

_LORA = ("peft.tuners.lora.Linear", "peft.tuners.lora.bnb.Linear4bit")


def without_wrappers(backbone: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile`` and PEFT's wrappers. It still runs all its adapters."""
    model = peft_model(backbone)
    return without_compilation(backbone if model is None else model.get_base_model())


def transformers_model(backbone: nn.Module) -> PreTrainedModel | None:
    """Return the Hugging Face model that ``backbone`` is or wraps; None for any other module."""
    inner = without_wrappers(backbone)
    return inner if isinstance(inner, PreTrainedModel) else None


def without_compilation(backbone: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile``'s wrapper. A module that is compiled in place has none."""
    return getattr(backbone, "_orig_mod", backbone)


def peft_model(backbone: nn.Module) -> Any:
    """Return the ``peft.PeftModel`` that ``backbone`` is or that ``torch.compile`` wraps; else None."""
    model = without_compilation(backbone)
    return model if is_instance(model, "peft.PeftModel") else None


def trained_copy(layer: Any) -> Any:
    """Return the active copy of a layer that PEFT trains whole (``modules_to_save``); any other layer unchanged."""
    if not is_instance(layer, "peft.utils.ModulesToSaveWrapper"):
        return layer
    active = layer.active_adapters
    if layer.disable_adapters or not active or any(name not in layer.modules_to_save for name in active):
        return layer.original_module
    return layer.modules_to_save[active[0]]


def is_adapter(layer: nn.Module) -> bool:
    """Return whether the layer is one of PEFT's, around another layer."""
    return is_instance(layer, "peft.tuners.tuners_utils.BaseTunerLayer", "peft.utils.other.AuxiliaryTrainingWrapper")


def is_lora(layer: nn.Module) -> bool:
    return is_instance(layer, *_LORA)


def base_layer(layer: Any) -> Any:
    """Return the layer that LoRA is around; any other layer unchanged."""
    return layer.base_layer if is_lora(layer) else layer


def trains_tokens(layer: nn.Module) -> bool:
    """Return whether PEFT trains some rows of a layer's weight (``trainable_token_indices``)."""
    return is_instance(layer, "peft.utils.other.TrainableTokensWrapper")


def weight_with_trained_tokens(layer: Any) -> Tensor:
    """Return the weight (V, D) of PEFT's own forward: a copy with the active adapter's rows, or the base weight."""
    adapter = layer.token_adapter
    if adapter.disable_adapters or not adapter.active_adapters:
        if adapter.merged:
            adapter.unmerge()  # PEFT's own forward does so, but it does not run
    elif not adapter.merged:
        return adapter.get_merged_weights(adapter.active_adapters)
    return adapter.base_layer.weight


def why_not_plain_lora(layer: Any) -> str | None:
    """Return why a LoRA layer differs from the formula above, to follow "its output layer"; None if it is equal."""
    if all(type(layer).forward is not kind.forward for kind in loaded_classes(*_LORA)):
        return f"is LoRA of a kind of its own ({full_name(layer)})"
    for name in layer.active_adapters:
        if name in layer.lora_variant:
            variant = type(layer.lora_variant[name]).__name__.removesuffix("LinearVariant")
            return f"has the LoRA variant {variant}, which does more than add a product to the weight"
        if name in layer.lora_A and layer.lora_bias[name]:
            return "has LoRA with a bias of its own (lora_bias=True)"
    return None


def lora_operands(layer: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``[h, s A h]`` (..., D + ranks) and ``[W, B]`` (V, D + ranks) over the active adapters, zero-padded to a
    multiple of eight columns, for fast matrix products on a GPU; the layer's own if adapters are merged or disabled. A
    W without a gradient is the frozen columns of B, (V, ranks)."""
    reason = why_not_plain_lora(layer)  # set_adapter() may have chosen another one since
    if reason is not None:
        raise UserError(f"the output layer {reason}; choose loss=standard")
    if layer.disable_adapters and layer.merged:
        layer.unmerge()  # PEFT's own forward does so, but it does not run
    weight = weight_of(layer.base_layer, hidden_states.dtype)
    adapters = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or not adapters:
        return hidden_states, weight
    frozen = frozen_columns(weight)
    if frozen is None and not weight.requires_grad:
        frozen = FrozenColumns(weight.__getitem__, weight.shape[1], weight.dtype)
    features, weights = [hidden_states], [weight] if frozen is None else []
    for name in adapters:
        down, up = layer.lora_A[name], layer.lora_B[name]
        dropped = layer.lora_dropout[name](hidden_states.to(down.weight.dtype))
        features.append((down(dropped) * layer.scaling[name]).to(hidden_states.dtype))
        weights.append(up.weight.to(weight.dtype))
    padding = -sum(x.shape[-1] for x in features) % 8
    features.append(hidden_states.new_zeros(*hidden_states.shape[:-1], padding))
    weights.append(weight.new_zeros(len(weight), padding))
    hidden_states, trained = torch.cat(features, -1), torch.cat(weights, -1)
    return hidden_states, trained if frozen is None else with_frozen_columns(trained, frozen)


def full_name(thing: Any) -> str:
    """Return module and name of an object's class."""
    return f"{type(thing).__module__}.{type(thing).__name__}"
