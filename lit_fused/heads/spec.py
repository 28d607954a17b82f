"""The output head as a formula: ``logits = softcap(scale * (h W^T + b) + offset)[..., :n_out]``.

Nearly every language model computes its logits by this formula from the output layer's input h. An
:class:`OutputHead` is the layer with the numbers of the formula. It reads weight, bias and buffers from their modules
at every use, because strategies replace parameters after construction.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_fused.heads.adapters import base_layer, is_lora, lora_operands, trains_tokens, weight_with_trained_tokens
from lit_fused.heads.quantised import is_quantised, weight_of
from lit_fused.ops.frozen_columns import frozen_columns, row_parts, whole_weight, with_frozen_columns
from lit_fused.ops.vocabulary_parallel import VocabularyShard

_OWN_ROWS = "_has_own_rows"
_ROWS = 8192  # of a quantised weight that are in memory at a time


def keep_own_rows(layer: nn.Module) -> None:
    """Say of a layer, whose weight is a DTensor divided by rows, that each rank has tokens of its own: the gradient is
    the mean over the ranks of the gradients of their losses, as FSDP2 makes it."""
    setattr(layer, _OWN_ROWS, True)


def has_own_rows(layer: nn.Module) -> bool:
    return getattr(layer, _OWN_ROWS, False)


def local_rows(tensor: DTensor, *, averaged: bool) -> Tensor:
    """Return this rank's rows of a tensor, whose gradient is divided by the number of ranks if it is ``averaged``."""
    own = tensor.to_local()
    if averaged and own.requires_grad:
        ranks = tensor.device_mesh.size()
        own.register_hook(lambda gradient: gradient / ranks)
    return own


@dataclass(frozen=True)
class OutputHead:
    """An output layer, and the operations of its model on the layer's output.

    Attributes:
        layer: has ``weight`` (V, D) and optionally ``bias`` (V,): one that :func:`supported_layer` returns.
        scale: factor on the layer's output, its bias included.
        softcap: c of ``c * tanh(x / c)``, applied last; None for no cap.
        n_out: number of vocabulary entries that become logits, the first ones; None for all.
        offset: the module and the name of a buffer or parameter of n_out numbers that the model adds to its logits; or
            None.
        is_by_position: the model needs a number for each position where its layer's output would be; else one for each
            entry of the vocabulary will do.
    """

    layer: nn.Module
    scale: float = 1.0
    softcap: float | None = None
    n_out: int | None = None
    offset: tuple[nn.Module, str] | None = None
    is_by_position: bool = False

    def operands(self, hidden_states: Tensor, in_parts: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return hidden states (..., D'), weight (n_out, D') and bias (n_out,) or None.

        ``logits = softcap(scale * (hidden weight^T) + bias)``. With LoRA on the output layer, D' is D plus the
        adapter's rank; otherwise D' = D, and hidden states and weight are the layer's own. If the vocabulary is
        divided, weight and bias are this rank's rows, those of :attr:`shard`.

        Args:
            hidden_states: (..., D), the layer's input.
            in_parts: leave frozen columns where they are: the weight is one of
                :func:`lit_fused.ops.frozen_columns.with_frozen_columns`, which our own operators take.
        """
        hidden_states, weight = self._layer_operands(hidden_states)
        if self.n_out is not None or isinstance(weight, DTensor):
            frozen, weight = frozen_columns(weight), self._own_rows(weight)
            weight = weight if frozen is None else with_frozen_columns(weight, frozen)
        return hidden_states, weight if in_parts else whole_weight(weight), self._bias

    @property
    def shard(self) -> VocabularyShard | None:
        """Return this rank's part of a vocabulary that ranks divide, or None, by the weight's own distribution."""
        weight = self._layer_weight
        if not isinstance(weight, DTensor):
            return None
        whole = VocabularyShard.of(weight, tokens_differ=has_own_rows(self.layer))
        return whole if self.n_out is None else whole.first(self.n_out)

    @property
    def has_bias(self) -> bool:
        return self._layer_bias is not None or self.offset is not None

    @property
    def width(self) -> int:
        """Return V, the number of the layer's outputs, also where ranks divide them."""
        return self._shape[0]

    @property
    def vocabulary(self) -> int:
        """Return the number of logits per token."""
        return self.width if self.n_out is None else self.n_out

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Return logits (..., n_out) of hidden states (..., D), for inference."""
        return self.transform(self.output(hidden_states))

    def output(self, hidden_states: Tensor) -> Tensor:
        """Return the layer's output (..., V) of hidden states (..., D)."""
        if self.shard is not None:
            return self.layer(hidden_states)  # its hooks gather the ranks' outputs
        hidden_states, weight = self._layer_operands(hidden_states)
        if not self._is_quantised:
            return F.linear(hidden_states, whole_weight(weight), self._layer_bias)
        products = torch.cat([F.linear(hidden_states, rows) for rows in row_parts(weight, _ROWS)], -1)
        return products if self._layer_bias is None else products + self._layer_bias

    def transform(self, output: Tensor) -> Tensor:
        """Return the logits (..., n_out) that the model makes of its output layer's output (..., V)."""
        logits = output if self.n_out is None else output[..., : self.n_out]
        logits = logits if self.scale == 1.0 else logits * self.scale
        offset = self._offset_vector
        logits = logits if offset is None else logits + offset
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def __str__(self) -> str:
        # A rank without the layer has a placeholder.
        is_here = hasattr(self.layer, "weight") or trains_tokens(self.layer)
        parts = [f"{type(self.layer).__name__} {self._shape}" if is_here else "output layer"]
        parts += ["bias"] if self._layer_bias is not None else []
        parts += [f"scale {self.scale:g}"] if self.scale != 1.0 else []
        parts += [f"plus {self.offset[1]}"] if self.offset is not None else []
        parts += [f"softcap {self.softcap:g}"] if self.softcap is not None else []
        parts += [f"first {self.n_out} entries"] if self.n_out is not None else []
        return ", ".join(parts)

    def _layer_operands(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        if self._has_lora:
            hidden_states, weight = lora_operands(self.layer, hidden_states)
        elif self._trains_tokens:
            weight = weight_with_trained_tokens(self.layer)
        else:
            weight = weight_of(self.layer, hidden_states.dtype)
        return hidden_states.to(weight.dtype) if self._is_quantised else hidden_states, weight

    def _own_rows(self, of_layer: Tensor) -> Tensor:
        """Return this rank's rows of the layer's weight or bias, without those beyond ``n_out``."""
        shard, own = self.shard, of_layer
        start = 0 if shard is None else shard.start
        if isinstance(of_layer, DTensor):
            own = local_rows(of_layer, averaged=has_own_rows(self.layer))
        return own if self.n_out is None else own[: max(self.n_out - start, 0)]

    @cached_property
    def _has_lora(self) -> bool:
        return is_lora(self.layer)

    @cached_property
    def _trains_tokens(self) -> bool:
        return trains_tokens(self.layer)

    @cached_property
    def _is_quantised(self) -> bool:
        return is_quantised(base_layer(self.layer))

    @property
    def _shape(self) -> tuple[int, ...]:
        """Return (V, D). A quantised weight may have another shape."""
        layer: Any = base_layer(self.layer)
        return (layer.out_features, layer.in_features) if self._is_quantised else tuple(self._layer_weight.shape)

    @property
    def _layer_weight(self) -> Tensor:
        layer = self.layer.original_module if self._trains_tokens else self.layer
        return layer.weight  # type: ignore[return-value]

    @property
    def _layer_bias(self) -> Tensor | None:
        return None if self._trains_tokens else getattr(self.layer, "bias", None)

    @property
    def _offset_vector(self) -> Tensor | None:
        return None if self.offset is None else getattr(*self.offset).flatten()

    @property
    def _bias(self) -> Tensor | None:
        """Return what is added *after* the scale, (n_out,) or this rank's part of it; None if nothing is."""
        bias = self._layer_bias
        if bias is None and self.offset is None:
            return None
        offset, shard = self._offset_vector, self.shard
        if shard is not None and offset is not None:
            offset = offset[shard.start : shard.start + len(self._own_rows(self._layer_weight))]
        if bias is None:
            return offset
        scaled = self._own_rows(bias) * self.scale
        return scaled if offset is None else scaled + offset
