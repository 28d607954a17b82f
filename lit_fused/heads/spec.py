"""The output head as a formula: ``logits = softcap(scale * (h W^T + b) + offset)[..., :n_out]``.

Nearly every language model's logits are this function of the output layer's input h. An :class:`OutputHead` is the
layer together with the numbers of that formula. It reads weight, bias and buffers from their modules at every use,
because strategies replace parameters after construction.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_fused.heads.adapters import is_lora, lora_operands, trains_tokens, weight_with_trained_tokens
from lit_fused.ops.linear_cross_entropy.plan import VocabularyShard


@dataclass(frozen=True)
class OutputHead:
    """An output layer and what its model does to the layer's output.

    Attributes:
        layer: owns ``weight`` (V, D) and optionally ``bias`` (V,); an ``nn.Linear``, an ``nn.Embedding``, or
            PEFT's LoRA around a linear layer, or its trained rows of one.
        scale: factor on the layer's output, its bias included.
        softcap: c of ``c * tanh(x / c)``, applied last; None for no cap.
        n_out: number of leading vocabulary entries that are kept; None keeps all.
        offset: the module and the name of a buffer of n_out numbers that the model adds to its logits; or None.
    """

    layer: nn.Module
    scale: float = 1.0
    softcap: float | None = None
    n_out: int | None = None
    offset: tuple[nn.Module, str] | None = None

    def operands(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states (..., D'), weight (n_out, D') and bias (n_out,) or None, with
        ``logits = softcap(scale * (hidden weight^T) + bias)``.

        They are the layer's own input and weight, D' = D, but for LoRA on the output layer: then the adapter's rank is
        added to D. Of a divided vocabulary, weight and bias are the rank's own rows, those of :attr:`shard`.
        """
        hidden_states, weight = self._layer_operands(hidden_states)
        return hidden_states, self._own_rows(weight), self._bias

    @property
    def shard(self) -> VocabularyShard | None:
        """The part of the vocabulary that this rank has under tensor parallelism; None for a whole one."""
        weight = self._layer_weight
        if not isinstance(weight, DTensor):
            return None
        whole = VocabularyShard.of(weight)
        return whole if self.n_out is None else whole.first(self.n_out)

    @property
    def has_bias(self) -> bool:
        return self._layer_bias is not None or self.offset is not None

    @property
    def vocabulary(self) -> int:
        """Number of logits per token."""
        return self.n_out if self.n_out is not None else self._layer_weight.shape[0]

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., n_out), for inference."""
        return self.transform(self.output(hidden_states))

    def output(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., V): what the layer itself computes."""
        if self.shard is not None:
            return self.layer(hidden_states)  # which gathers what the ranks compute
        return F.linear(*self._layer_operands(hidden_states), self._layer_bias)

    def transform(self, output: Tensor) -> Tensor:
        """What the model does to its output layer's output (..., V)."""
        logits = output if self.n_out is None else output[..., : self.n_out]
        if self.scale != 1.0:
            logits = logits * self.scale
        offset = self._offset_vector
        if offset is not None:
            logits = logits + offset
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def __str__(self) -> str:
        parts = [f"{type(self.layer).__name__} {tuple(self._layer_weight.shape)}"]
        parts += ["bias"] if self._layer_bias is not None else []
        parts += [f"scale {self.scale:g}"] if self.scale != 1.0 else []
        parts += [f"plus {self.offset[1]}"] if self.offset is not None else []
        parts += [f"softcap {self.softcap:g}"] if self.softcap is not None else []
        parts += [f"first {self.n_out} entries"] if self.n_out is not None else []
        return ", ".join(parts)

    def _layer_operands(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        if is_lora(self.layer):
            return lora_operands(self.layer, hidden_states)
        if trains_tokens(self.layer):
            return hidden_states, weight_with_trained_tokens(self.layer)
        return hidden_states, self._layer_weight

    def _own_rows(self, of_layer: Tensor) -> Tensor:
        """The rows of the layer's weight or bias that are logits, on this rank."""
        start = 0
        if isinstance(of_layer, DTensor):
            start = VocabularyShard.of(of_layer).start
            of_layer = of_layer.to_local()
        return of_layer if self.n_out is None else of_layer[: max(self.n_out - start, 0)]

    @property
    def _layer_weight(self) -> Tensor:
        layer = self.layer.original_module if trains_tokens(self.layer) else self.layer
        return layer.weight  # type: ignore[return-value]

    @property
    def _layer_bias(self) -> Tensor | None:
        return None if trains_tokens(self.layer) else getattr(self.layer, "bias", None)

    @property
    def _offset_vector(self) -> Tensor | None:
        """(n_out,)"""
        return None if self.offset is None else getattr(*self.offset).flatten()

    @property
    def _bias(self) -> Tensor | None:
        """(n_out,), or this rank's part of it, to be added *after* the scale."""
        bias, offset, shard = self._layer_bias, self._offset_vector, self.shard
        if shard is not None and offset is not None:
            offset = offset[shard.start : shard.start + len(self._own_rows(self._layer_weight))]
        if bias is not None:
            bias = self._own_rows(bias)
            bias = bias if self.scale == 1.0 else bias * self.scale
        if offset is None:
            return bias
        return offset if bias is None else bias + offset
