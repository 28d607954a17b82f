"""Passes of the heads as operators of :mod:`torch.library`: a compiler keeps them whole, as it keeps a matrix product.

One autograd function has forward and backward of a head. Compiled, it calls each pass as an operator, of which the
compiler sees the tensors and nothing else; called without a compiler, it calls the same Python function.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from .kernel_path import HeadCall, Wanted
from .options import LossOptions

_Function = TypeVar("_Function", bound=Callable[..., Any])
_OPTIONS = [field.name for field in fields(LossOptions)]
# The outermost package names the operators, so that copies of this folder in other packages can be loaded beside it.
_NAMESPACE = __name__.partition(".")[0]


def one_graph_break(function: _Function, *, recursive: bool = True) -> _Function:
    """Keep ``torch.compile`` out of a function, whose kernels it takes as they are; ``recursive=False``: but for the
    functions that it calls."""
    disabled: Any = torch.compiler.disable(function, recursive=recursive)
    return disabled


def _kind(hint: Any) -> str:
    """Return what a schema calls an annotation: ``float``, and for ``float | None`` ``float?``."""
    return hint.__name__ if isinstance(hint, type) else f"{get_args(hint)[0].__name__}?"


_CALL = "int ignore_index, bool checked, ScalarType compute_dtype, bool[] wanted, " + ", ".join(
    f"{_kind(field.type)} {field.name}" for field in fields(LossOptions)
)


def operator(
    name: str, tensors: int, compute: Callable[..., Sequence[Tensor]], shapes: Callable[..., Sequence[Tensor]]
) -> Callable[..., Sequence[Tensor]]:
    """Return ``compute(*tensors, call)``, of so many tensors or None, as an operator of that name.

    ``shapes`` takes the same, and returns uninitialised tensors like the results.
    """

    def with_call(function: Callable[..., Sequence[Tensor]]) -> Callable[..., list[Tensor]]:
        def run(*arguments: Any) -> list[Tensor]:
            ignore_index, checked, dtype, wanted, *options = arguments[tensors:]
            call = HeadCall(LossOptions(*options), ignore_index, dtype, Wanted(*wanted), checked=checked)
            return list(function(*arguments[:tensors], call))

        return run

    schema = "".join(f"Tensor? tensor{place}, " for place in range(tensors)) + _CALL
    whole: Any = torch.library.custom_op(
        f"{_NAMESPACE}::{name}", with_call(compute), mutates_args=(), schema=f"({schema}) -> Tensor[]"
    )
    whole.register_fake(with_call(shapes))

    def run(*arguments: Any) -> Sequence[Tensor]:
        call: HeadCall = arguments[-1]
        options = [getattr(call.options, name) for name in _OPTIONS]
        return whole(*arguments[:-1], call.ignore_index, call.checked, call.compute_dtype, [*call.wanted], *options)

    return run


def empty_rows(targets: Tensor, call: HeadCall, *more: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return uninitialised numbers in the shape of the targets and more, of the dtype of losses if none is given."""
    return targets.new_empty((*targets.shape, *more), dtype=dtype or call.result_dtype)


def gradient_shapes(*tensors_and_call: Any) -> list[Tensor]:
    """Return uninitialised gradients, in their operands' dtypes. The last tensors are those of a call and two more."""
    *_, hidden_states, weight, bias, _, _, call = tensors_and_call
    return empty_gradients((hidden_states, weight, bias), call)


def empty_gradients(
    operands: Sequence[Tensor | None], call: HeadCall, dtypes: Sequence[torch.dtype | None] = (None,) * 3
) -> list[Tensor]:
    """Return uninitialised gradients of the operands that want one, in these dtypes or the operands' own."""
    each = zip(operands, dtypes, call.wanted, strict=True)
    return [x.new_empty(x.shape, dtype=dtype or x.dtype) for x, dtype, wanted in each if wanted and x is not None]
