"""The options of a loss, checked once, where they are constructed."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch

from lit_fused.errors import UserError, check_number, check_switches
from lit_fused.ops.first_derivatives import has_tangent

# The rule of each number: what it must be, whether it is, and a hint. None is allowed where it is the default.
_NUMBERS: dict[str, tuple[str, Callable[[Any], bool], str]] = {
    "scale": ("be a number other than zero", lambda x: 0 < abs(x) < math.inf, ""),
    "softcap": ("be a positive number or None", lambda x: 0 < x < math.inf, ""),
    "label_smoothing": ("lie in [0, 1]", lambda x: 0 <= x <= 1, ""),
    "z_loss": ("be a number and not negative", lambda x: 0 <= x < math.inf, "1e-4 is a usual value"),
    "logits_budget_mib": ("be positive", lambda x: 0 < x < math.inf, "null lets the device decide"),
    "chunk_size": ("be a positive number of rows", lambda x: x > 0, "4096 is a usual value"),
}


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

    def __post_init__(self) -> None:
        refuse_trained(self)
        check_switches({f.name: f.type for f in fields(self)}, vars(self))
        for name, rule in _NUMBERS.items():
            if getattr(self, name) is not getattr(LossOptions, name):
                check_number(name, getattr(self, name), *rule, whole=name == "chunk_size")
        rows = self.chunk_size
        if rows is not None and self.logits_budget_mib is not None:
            raise UserError(
                f"chunk_size={rows} and logits_budget_mib={self.logits_budget_mib} both set the size of a chunk of "
                "logits; choose one of them"
            )
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
    values, by_backward = {f.name: getattr(options, f.name) for f in fields(options)}, torch.is_grad_enabled()
    trained = [n for n, v in values.items() if (by_backward and getattr(v, "requires_grad", False)) or has_tangent(v)]
    if trained:
        raise UserError(
            f"{' and '.join(trained)} wants a gradient, and a fused loss has none for it; multiply the hidden states "
            "by a scale or an inverse temperature that is trained, and pass a number otherwise"
        )
