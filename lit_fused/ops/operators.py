"""Heads as operators of :mod:`torch.library`: compiled callers keep them whole, as they keep a matrix product.

A compiler sees an operator's tensors, and nothing of what it computes. So forward returns all that backward needs,
backward is an operator of its own, and both state the shapes and dtypes of their results without computing them. All
operators have the same operands, after tensors of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from lit_fused.ops.kernel_path import Wanted
from lit_fused.ops.operands import Operands, PreparedRows, computed_here
from lit_fused.ops.options import LossOptions

_OPTIONS = {field.name: field for field in fields(LossOptions)}


def _kind(hint: Any) -> str:
    """Return what a schema calls an annotation: ``float``, and for ``float | None`` ``float?``."""
    return hint.__name__ if isinstance(hint, type) else f"{get_args(hint)[0].__name__}?"


_SCHEMA = (
    "Tensor hidden_states, Tensor weight, Tensor? bias, Tensor targets, Tensor? selected, Tensor? token_weights, "
    "int ignore_index, ScalarType compute_dtype, bool[] wanted, "
    + ", ".join(f"{_kind(field.type)} {name}" for name, field in _OPTIONS.items())
)

TENSORS = 6  # the operands that are tensors come first

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Tensors = list[Tensor]


def one_graph_break(function: _Function, *, recursive: bool = True) -> _Function:
    """Keep ``torch.compile`` out of a function, whose kernels it takes as they are; ``recursive=False``: but for the
    functions that it calls."""
    disabled: Any = torch.compiler.disable(function, recursive=recursive)
    return disabled


def in_schema(tensors: tuple[Any, ...], ignore_index: int, options: dict[str, Any]) -> tuple[Any, ...]:
    """Return the operands of an operator that is called here. Its options are not looked at: they can be symbols."""
    compute_dtype, wanted = computed_here(*tensors[:3])
    in_order = [options.get(name, field.default) for name, field in _OPTIONS.items()]
    return *tensors, ignore_index, compute_dtype, list(wanted), *in_order


def of_schema(*operands: Any) -> Operands:
    """Return the operands of an operator."""
    options = LossOptions(**dict(zip(_OPTIONS, operands[TENSORS + 3 :], strict=True)))
    return Operands._make((*operands[: TENSORS + 2], Wanted(*operands[TENSORS + 2]), options))


def operator(name: str, own: int, compute: Callable[..., _Tensors], shapes: Callable[..., _Tensors]) -> Any:
    """Return ``compute(*own_tensors, operands)`` as the operator ``lit_fused::<name>``: ``own`` tensors, which may be
    None, precede the operands. ``shapes`` takes the same, and returns empty tensors like the results."""

    def with_operands(function: Callable[..., _Tensors]) -> Callable[..., _Tensors]:
        return lambda *arguments: function(*arguments[:own], of_schema(*arguments[own:]))

    schema = "".join(f"Tensor? own{place}, " for place in range(own)) + _SCHEMA
    found: Any = torch.library.custom_op(
        f"lit_fused::{name}", with_operands(compute), mutates_args=(), schema=f"({schema}) -> Tensor[]"
    )
    found.register_fake(with_operands(shapes))
    return found


def backward_operator(name: str, own: int, compute: Callable[..., Sequence[Tensor | None]]) -> Any:
    """Return the operator ``lit_fused::<name>_backward``, whose results are the gradients of the rows that
    ``compute(rows, *own_tensors)`` returns, for the operands that want one."""

    def backward(*arguments: Any) -> _Tensors:
        *tensors, operands = arguments
        rows = operands.checked_rows()
        return as_results(compute(rows, *tensors), rows, operands)

    return operator(f"{name}_backward", own, backward, lambda *arguments: empty_gradients(arguments[-1]))


def empty(operands: Operands, shape: Sequence[int] = (), dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialised result of an operator, of the dtype of losses if none is given."""
    dtype = dtype or torch.promote_types(operands.compute_dtype, torch.float32)
    return operands.targets.new_empty(shape, dtype=dtype)


def empty_gradients(operands: Operands, *, unscaled: bool = False) -> _Tensors:
    """Return uninitialised gradients like those of :func:`as_results`."""
    return [empty(operands, to.shape, _dtype(to, unscaled)) for to in _differentiated(operands)]


def as_results(
    gradients: Sequence[Tensor | None], rows: PreparedRows, operands: Operands, *, unscaled: bool = False
) -> _Tensors:
    """Return wanted gradients in their operands' shapes and dtypes; ``unscaled``: in one that cannot overflow."""
    hidden_ND, *others = gradients
    hidden = None if hidden_ND is None else rows.placed(hidden_ND).view_as(operands.hidden_states)
    found = [gradient for gradient in (hidden, *others) if gradient is not None]
    return [g.to(_dtype(to, unscaled)) for g, to in zip(found, _differentiated(operands), strict=True)]


def of_operands(gradients: _Tensors, tensors: Sequence[Tensor | None], wanted: list[bool]) -> tuple[Any, ...]:
    """Return what backward of an operator returns: gradients in the dtypes of the operands that want one, else None."""
    found = iter(gradients)
    operands = zip(tensors[:3], wanted, strict=True)
    of_tensors = [next(found).to(to.dtype) if needed and to is not None else None for to, needed in operands]
    return *of_tensors, *[None] * (_SCHEMA.count(", ") - 2)


def _differentiated(operands: Operands) -> _Tensors:
    pairs = zip(operands[:3], operands.wanted, strict=True)
    return [tensor for tensor, wanted in pairs if wanted and tensor is not None]


def _dtype(to: Tensor, unscaled: bool) -> torch.dtype:
    return torch.float32 if unscaled and to.dtype == torch.float16 else to.dtype
