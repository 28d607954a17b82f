"""Make fake tensors on a CPU allocate what a GPU's operators would.

A machine without CUDA cannot run autograd on fake CUDA tensors, so they are fake CPU tensors, under the CPU's autocast.
Some functions allocate differently on a GPU, and are replaced by what they do there: attention, dropout, products of
experts, and what CUDA's autocast runs in float32.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_HALVES = (torch.float16, torch.bfloat16)


class CudaFunctions(TorchFunctionMode):
    """A mode in which functions allocate as they do on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        replacement = _REPLACED.get(func)
        if replacement is not None:
            return replacement(*args, **kwargs)
        if func in _IN_FLOAT32 and torch.is_autocast_enabled("cpu") and kwargs.get("dtype") is None:
            args = tuple(a.float() if isinstance(a, Tensor) and a.dtype in _HALVES else a for a in args)
        return func(*args, **kwargs)


# Functions of language models that CUDA's autocast runs in float32, and the CPU's does not.
_IN_FLOAT32 = {
    F.softmax, F.log_softmax, F.layer_norm, F.group_norm, torch.softmax, torch.log_softmax, torch.layer_norm,
    Tensor.softmax, Tensor.log_softmax, torch.pow, Tensor.pow, torch.rsqrt, Tensor.rsqrt, torch.exp, Tensor.exp,
    torch.log, Tensor.log, F.softplus,
}  # fmt: skip


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p else input


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any
) -> Tensor:
    """Allocate as flash attention where a GPU would take it, else as the memory-efficient kernel, else as products."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (t.to(dtype) if t.is_floating_point() else t for t in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    flash = attn_mask is None and query.dtype in _HALVES and max(query.shape[-1], value.shape[-1]) <= 256
    groups = options.get("enable_gqa") and query.shape[1] != key.shape[1]
    if not flash and (groups or query.shape[-1] % 4):
        return torch.ops.aten._scaled_dot_product_attention_math(query, key, value, attn_mask, *rest, **options)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty(attn_mask.shape, dtype=query.dtype)
    return _Attention.apply(query, key, value, attn_mask)  # type: ignore[return-value]


class _Attention(torch.autograd.Function):
    """Allocate as flash attention does: the result and one number per row; in backward a float32 sum of dq."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:  # type: ignore[override]
        batch, heads, tokens, _ = query.shape
        out = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
        lse = query.new_empty(batch, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, _, _, _ = ctx.saved_tensors
        batch, heads, tokens, size = query.shape
        sums = [query.new_empty(batch, heads, tokens, dtype=torch.float32)]
        if query.dtype in _HALVES:
            sums.append(query.new_empty(batch, tokens, heads, size, dtype=torch.float32))
        dq, dk, dv = (torch.empty_like(t) for t in (query, key, value))
        if key.shape[1] != heads:  # one dk and dv for each query head, summed over the heads that share them
            sums += [key.new_empty(batch, key.shape[2], heads, t.shape[-1]) for t in (key, value)]
        return dq, dk, dv, None


def _grouped_product(mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, **_: Any) -> Tensor:
    # Rows (S, D) times each expert's own matrix of (E, D, F). The fake operator knows bfloat16 only.
    return _GroupedProduct.apply(mat_a, mat_b)  # type: ignore[return-value]


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows, matrices)
        return rows.new_empty(len(rows), matrices.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        rows, matrices = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(matrices)


_REPLACED: dict[Any, Callable[..., Tensor]] = {F.scaled_dot_product_attention: _attention, F.dropout: _dropout}
for _module, _name in ((F, "grouped_mm"), (torch, "_grouped_mm")):  # the second is its name before torch 2.10
    if hasattr(_module, _name):
        _REPLACED[getattr(_module, _name)] = _grouped_product
