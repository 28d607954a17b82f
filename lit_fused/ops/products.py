"""Matrix products summed in float32 whatever the dtype of their factors.

The vendor's kernels for a GPU move 16 bytes at a time: where the contiguous extent of a matrix is no multiple of that
(a vocabulary of 50257, as K of the product with the weight), a product takes more than five times as long. So every
product is cut there at the last multiple, and what is left, at most 7 rows or columns in bfloat16, is a product of its
own. That needs rows that begin at such multiples, which :func:`with_aligned_rows` allocates.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Product = Callable[[Any, Tensor, Tensor, Tensor], None]

VECTOR_BYTES = 16
CUT_ON = ("cuda",)  # a CPU's products take unaligned rows as they are


def padded(columns: int) -> int:
    """Return the length of a row whose successor is aligned, for the copy engine and the vendor's products alike."""
    return -(-columns // 64) * 64


def with_aligned_rows(like: Tensor, rows: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialised matrix whose rows are padded in memory."""
    matrix = like.new_empty(rows, padded(columns), dtype=dtype)
    if matrix.is_cpu:  # oneDNN's bfloat16 products multiply the padding by zero: it must not be NaN.
        matrix[:, columns:] = 0
    return matrix[:, :columns]


def _aligned(matrix: Tensor, dim: int) -> int:
    """Return the largest part of an extent that is a multiple of 16 bytes, or all of it where a cut gains nothing: it
    is not contiguous, or rows do not begin at such multiples."""
    extent, unit = matrix.shape[dim], VECTOR_BYTES // matrix.itemsize
    gains = matrix.stride(dim) == 1 and matrix.stride(1 - dim) % unit == 0
    return (extent // unit * unit if gains else extent) or extent


def _in_aligned_parts(product: Product) -> Product:
    """Have ``product`` make its result in parts of aligned extents, and the few rows or columns that are left."""

    @wraps(product)
    def in_parts(self: Any, a: Tensor, b: Tensor, out: Tensor) -> None:
        if out.device.type not in CUT_ON:
            product(self, a, b, out)
        elif (depth := _aligned(a, 1)) < a.shape[1]:
            # The few come first, so that the large sum is rounded once.
            in_parts(self, a[:, depth:], b[depth:], out)
            self.multiply_add(a[:, :depth], b[:depth], out)
        elif (rows := _aligned(a, 0)) < a.shape[0]:
            in_parts(self, a[:rows], b, out[:rows])
            in_parts(self, a[rows:], b, out[rows:])
        elif (columns := _aligned(out, 1)) < out.shape[1]:
            in_parts(self, a, b[:, :columns], out[:, :columns])
            in_parts(self, a, b[:, columns:], out[:, columns:])
        else:
            product(self, a, b, out)

    return in_parts


class Products:
    """The vendor's products; every set of kernels has them."""

    handles_ignored = True  # rows whose target is negative may be among the inputs

    @_in_aligned_parts
    def multiply(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Write ``out = a @ b``; ``out`` may be float32 where the factors are half precision."""
        if not a.shape[1]:  # this rank has no entry of the vocabulary
            out.zero_()
        elif a.dtype == out.dtype:
            torch.mm(a, b, out=out)
        elif a.is_cuda:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
        else:  # products on a CPU have the dtype of their factors and are rounded once
            out.copy_(torch.mm(a, b))

    @_in_aligned_parts
    def multiply_add(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Write ``out += a @ b``, rounded to the dtype of ``out`` once per product."""
        if a.dtype == out.dtype:
            out.addmm_(a, b)
        elif a.is_cuda:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            out.add_(torch.mm(a, b))

    def scale_(self, tensor: Tensor, factor: Tensor) -> None:
        """Multiply a tensor by a scalar on the device, in place. What is zero stays zero, also where the factor is not
        finite: a token that is ignored has no gradient, whatever its loss is divided by."""
        if factor.is_cpu and factor.isfinite():
            tensor.mul_(factor)
        else:
            zeros = tensor == 0
            tensor.mul_(factor).masked_fill_(zeros, 0)
