"""The refusal of second derivatives: fused backward passes are formulas, which autograd does not see."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .user_error import UserError

_NONE = "a fused loss has no second derivatives, and {} asks for them; leave create_graph out, or choose loss=standard"


def refuse_second_derivatives() -> None:
    """Raise a UserError if backward is to be differentiated again. Call it in backward: its results would count as
    constants, and whatever depends on their derivatives would be wrong without a word."""
    # No compiler differentiates a compiled backward, and while it traces one the flag says nothing.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UserError(_NONE.format("backward was called with create_graph=True, which"))


def without_second_derivatives(gradients: Callable[[], Sequence[Tensor]], *inputs: Tensor | None) -> Sequence[Tensor]:
    """Return the gradients of these inputs, and raise a UserError where they are differentiated again."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return gradients()
    with torch.no_grad():
        found = gradients()
    return [_Constant.apply(gradient, *inputs) for gradient in found]  # type: ignore[misc]


class _Constant(torch.autograd.Function):
    """Passes a gradient on, as a function of the inputs that has no derivative."""

    @staticmethod
    def forward(gradient: Tensor, *inputs: Tensor | None) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:  # type: ignore[override]
        raise UserError(_NONE.format("the derivative of a gradient was taken, which"))


class FirstDerivativeOnly(torch.autograd.Function):
    """Passes a summed loss on, and refuses its second derivatives. Unless it ``counts`` any token its gradient is zero,
    whatever it is multiplied by: 0 / 0 in the caller's mean is not a number."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, counts: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(counts)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        refuse_second_derivatives()
        (counts,) = ctx.saved_tensors
        return grad.where(counts, 0), None
