"""The options of a loss, checked once, where they are constructed."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch

from lit_fused.errors import UserError


@dataclass(frozen=True)
class LossOptions:
    """The options of :func:`lit_fused.ops.linear_cross_entropy`, which documents each of them."""

    scale: float = 1.0
    softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    reduction: str = "mean"
    statistics: bool = True
    recompute: bool = False
    drop_ignored: bool = False
    float32_accumulation: bool | None = None
    logits_budget_mib: float | None = None
    chunk_size: int | None = None
    filter_eps: float | None = None

    def __post_init__(self) -> None:
        refuse_trained(self)
        eps = self.filter_eps
        if not 0 <= self.label_smoothing <= 1:
            raise UserError(f"label_smoothing must lie in [0, 1], got {self.label_smoothing}")
        if not 0 <= self.z_loss < math.inf:
            raise UserError(f"z_loss must be a number and not negative, got {self.z_loss}; 1e-4 is a usual value")
        if self.logits_budget_mib is not None and self.logits_budget_mib <= 0:
            raise UserError(
                f"logits_budget_mib must be positive, got {self.logits_budget_mib}; null lets the device decide"
            )
        rows = self.chunk_size
        if rows is not None and (type(rows) is not int or rows < 1):
            raise UserError(f"chunk_size must be a positive number of rows, got {rows!r}; 4096 is a usual value")
        if rows is not None and self.logits_budget_mib is not None:
            raise UserError(
                f"chunk_size={rows} and logits_budget_mib={self.logits_budget_mib} both set the size of a chunk of "
                "logits; choose one of them"
            )
        if eps is not None and (not isinstance(eps, int | float) or not 0 <= eps < 1):
            raise UserError(
                f"filter_eps must be a probability, at least 0 and below 1, got {eps!r}; 0.000244 (2**-12) is a "
                "usual value, null (None) filters nothing"
            )
        if eps is not None and self.label_smoothing:
            raise UserError(
                f"filter_eps={eps} drops columns of the vocabulary whose probabilities are small, and with "
                f"label_smoothing={self.label_smoothing} their gradient is not small; choose one of them: loss=chunked "
                "smooths"
            )
        if self.scale == 0 or not math.isfinite(self.scale):
            raise UserError(f"scale must be a number other than zero, got {self.scale}")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise UserError(f"softcap must be a positive number or None, got {self.softcap}")
        if self.reduction not in ("mean", "sum", "none"):
            raise UserError(f"reduction must be 'mean', 'sum' or 'none', got {self.reduction!r}")

    def gradients_in_forward(self, wanted: Iterable[bool]) -> bool:
        """Return whether an exact path makes the gradients in forward, if these are wanted."""
        return any(wanted) and not self.recompute and self.reduction != "none"

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}


def refuse_trained(options: Any) -> None:
    """Refuse options, fields of a dataclass, that want a gradient: it would be lost without a word."""
    trained = [f.name for f in fields(options) if getattr(getattr(options, f.name), "requires_grad", False)]
    if trained and torch.is_grad_enabled():
        raise UserError(
            f"{' and '.join(trained)} wants a gradient, and a fused loss has none for it; multiply the hidden states "
            "by a scale or an inverse temperature that is trained, and pass a number otherwise"
        )
