"""Adagrad with one sum of squares for each row of a table, as recommenders use it for tables of millions of items.

A table (V, D) has V numbers of state in place of Adagrad's V D and AdamW's 2 V D. It is the rule of FBGEMM's
EXACT_ROWWISE_ADAGRAD: with the mean square of a row's gradient, s <- s + mean(g^2), w <- w - lr g / (sqrt(s) + eps).
Parameters of one dimension have a sum for each entry.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_fused.errors import check_number
from lit_fused.parallel import local


class RowWiseAdagrad(Optimizer):
    """Adagrad whose state is one float32 per row.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        eps: added to the root.
        weight_decay: decoupled: the parameter shrinks by ``lr * weight_decay`` in each step.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, eps: float = 1e-8, weight_decay: float = 0.0) -> None:
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            check_number(name, value, "not be negative", lambda x: 0 <= x < math.inf)
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, dims = self.state[parameter], tuple(range(1, parameter.ndim))
        if "sum" not in state:  # The norm gives the state its shape, and the parameter's distribution over ranks.
            like = torch.linalg.vector_norm(parameter, 2, dims, True) if dims else parameter
            state["sum"] = torch.zeros_like(like, dtype=torch.float32)
        total = state["sum"]
        if _has_whole_rows(parameter):  # Operations on distributed tensors take the host a tenth of a millisecond each.
            parameter, gradient, total = local(parameter), local(gradient), local(total)
        # The gradient is not copied: its norm is taken, and it is scaled in place, as a step may do with it.
        square = gradient.float().square() if not dims else torch.linalg.vector_norm(gradient, 2, dims, True).float()
        if dims:
            square = square.square() / parameter.shape[1:].numel()
        total += square
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        factor = group["lr"] / (total.sqrt() + group["eps"])
        parameter.addcmul_(gradient, factor.to(gradient.dtype), value=-1)


def _has_whole_rows(parameter: Tensor) -> bool:
    """Return whether a parameter is distributed so that each rank has some of its rows."""
    return isinstance(parameter, DTensor) and all(getattr(p, "dim", None) == 0 for p in parameter.placements)
