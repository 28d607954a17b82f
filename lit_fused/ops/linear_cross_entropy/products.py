"""Matrix products that are summed in float32 whatever the dtype of their factors and, where the device can, of their
result."""

import torch
from torch import Tensor


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """``out = a @ b``; ``out`` may be float32 where the factors are half precision."""
    if not a.shape[1]:  # the part of a rank that has none of the vocabulary
        out.zero_()
    elif a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:  # CPU products have the dtype of their factors: rounded once
        out.copy_(torch.mm(a, b))


def multiply_add(a: Tensor, b: Tensor, out: Tensor) -> None:
    """``out += a @ b``, rounded to the dtype of ``out`` once per call."""
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.add_(torch.mm(a, b))
