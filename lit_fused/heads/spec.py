"""The output head as a formula: ``logits = softcap(scale * (h W^T + b))[..., :n_out]``.

Nearly every language model's logits are this function of the output layer's input h. An :class:`OutputHead` is the
layer together with the numbers of that formula. It reads weight and bias from the layer at every use, because
strategies replace parameters after construction.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class OutputHead:
    """An output layer and what its model does to the layer's output.

    Attributes:
        layer: owns ``weight`` (V, D) and optionally ``bias`` (V,).
        scale: factor on the layer's output, its bias included.
        softcap: c of ``c * tanh(x / c)``, applied last; None for no cap.
        n_out: number of leading vocabulary entries that are kept; None keeps all.
    """

    layer: nn.Linear | nn.Embedding
    scale: float = 1.0
    softcap: float | None = None
    n_out: int | None = None

    @property
    def weight(self) -> Tensor:
        """(n_out, D), as it is now."""
        return self.layer.weight if self.n_out is None else self.layer.weight[: self.n_out]

    @property
    def bias(self) -> Tensor | None:
        """(n_out,), to be added *after* the scale; None for a layer without one."""
        bias = self.layer.bias if isinstance(self.layer, nn.Linear) else None
        if bias is None:
            return None
        bias = bias if self.n_out is None else bias[: self.n_out]
        return bias if self.scale == 1.0 else bias * self.scale

    @property
    def vocabulary(self) -> int:
        """Number of logits per token."""
        return self.n_out if self.n_out is not None else self.layer.weight.shape[0]

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., n_out), for inference."""
        return self.transform(F.linear(hidden_states, self.layer.weight, getattr(self.layer, "bias", None)))

    def transform(self, output: Tensor) -> Tensor:
        """What the model does to its output layer's output (..., V)."""
        logits = output if self.n_out is None else output[..., : self.n_out]
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def __str__(self) -> str:
        parts = [f"{type(self.layer).__name__} {tuple(self.layer.weight.shape)}"]
        parts += ["bias"] if self.bias is not None else []
        parts += [f"scale {self.scale:g}"] if self.scale != 1.0 else []
        parts += [f"softcap {self.softcap:g}"] if self.softcap is not None else []
        parts += [f"first {self.n_out} entries"] if self.n_out is not None else []
        return ", ".join(parts)
