"""The refusal of second derivatives: fused backward passes are formulas, which autograd does not see."""

from typing import Any

import torch
from torch import Tensor

from lit_fused.errors import UserError


def refuse_second_derivatives() -> None:
    """Raise a UserError if backward is to be differentiated again. Call it in backward: its results would count as
    constants, and whatever depends on their derivatives would be wrong without a word."""
    if torch.is_grad_enabled():
        raise UserError(
            "a fused loss has no second derivatives, and backward was called with create_graph=True, which asks for "
            "them; leave create_graph out, or choose loss=standard"
        )


class FirstDerivativeOnly(torch.autograd.Function):
    """Passes a loss on, and refuses its second derivatives."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:  # type: ignore[override]
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        refuse_second_derivatives()
        return grad
