"""Matrix products summed in float32 whatever the dtype of their factors."""

import torch
from torch import Tensor


class Products:
    """The vendor's products; every set of kernels has them."""

    handles_ignored = True  # rows whose target is negative may be among the inputs

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

    def multiply_add(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Write ``out += a @ b``, rounded to the dtype of ``out`` once per call."""
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


class NoKernels(Products):
    """Kernels that compute nothing: with them, on fake tensors, a path allocates what it allocates on a GPU."""

    def multiply(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        return

    def scale_(self, tensor: Tensor, factor: Tensor) -> None:
        return

    multiply_add = multiply

    def multiprocessors(self, device: torch.device) -> int:
        """Return those of an H100 or H200, as Hopper's own path needs them."""
        return 132

    def __getattr__(self, name: str):
        return lambda *args, **options: None
