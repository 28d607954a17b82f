"""The refusal of second derivatives: fused backward passes are formulas, which autograd does not see."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lit_fused.errors import UserError

_NONE = "a fused loss has no second derivatives, and {} asks for them; leave create_graph out, or choose loss=standard"


def refuse_vmap(*gradients: Tensor | None) -> None:
    """Raise a UserError under ``torch.vmap``, or in backward for gradients of many losses (``jacrev``)."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    levels = functorch.get_interpreter_stack() or ()
    kinds = functorch.is_batchedtensor, functorch.is_legacy_batchedtensor
    if any(is_kind(g) for g in gradients if g is not None for is_kind in kinds) or any(
        level.key() == functorch.TransformType.Vmap for level in levels
    ):
        raise UserError(
            "a fused loss does not run under torch.vmap: it takes leading dimensions itself, and with reduction='none' "
            "it gives the loss of each token"
        )


def refuse_forward_mode(*inputs: Tensor | None) -> None:
    """Raise a UserError for inputs that have a tangent (``torch.func.jvp``)."""
    if any(has_tangent(tensor) for tensor in inputs):
        raise UserError(
            "a fused loss has no forward-mode derivatives (torch.func.jvp, jacfwd, hessian); take its gradient by "
            "backward, torch.func.grad or torch.func.vjp"
        )


def has_tangent(value: Any) -> bool:
    """Return whether a value is a tensor with a tangent, or wrapped by another transform so that one cannot be seen."""
    if not isinstance(value, Tensor) or torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return forward_ad.unpack_dual(value).tangent is not None or functorch.is_functorch_wrapped_tensor(value)


def refuse_second_derivatives() -> None:
    """Raise a UserError if backward is to be differentiated again. Call it in backward: its results would count as
    constants, and whatever depends on their derivatives would be wrong without a word."""
    if torch.is_grad_enabled():
        raise UserError(_NONE.format("backward was called with create_graph=True, which"))


def without_second_derivatives(
    gradients: Callable[[], tuple[Tensor | None, ...]], *inputs: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of these inputs; whoever differentiates them again is refused."""
    with torch.no_grad():
        found = gradients()
    if not torch.is_grad_enabled():
        return found
    return tuple(None if gradient is None else _Constant.apply(gradient, *inputs) for gradient in found)


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
