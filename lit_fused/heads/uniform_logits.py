"""Logits whose entries are all alike: of the shape (..., V), in the memory of one column.

A model sees the shape of its logits and can do anything to them. What treats all entries alike is computed for the one
column. What tells them apart, by an operand of vocabulary size, an index, an order or a sum, gives numbers that are
marked, as is all that is made of them; and what writes into some of the entries, as a mask may, writes into all. So a
watch finds either in what comes back, and what only looks at logits, as a log does, is no fault.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
_POINTWISE = {aten._to_copy, aten.copy_, aten.fill_, aten.zero_, aten.masked_fill_, aten.addcmul, aten.addcmul_}
_POINTWISE |= {aten.lerp, aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like}

_DIMENSIONS = {aten.cat: 1, aten.stack: 1, aten.index_select: 1, aten.flip: 1, aten.roll: 2}  # its number


class UniformLogits(Tensor):
    """Logits (..., V) with ``same``, a plain tensor of their shape in which the entries of a row share their memory.
    They are not ``is_uniform`` if made in a way that tells entries apart."""

    same: Tensor
    is_uniform: bool

    @staticmethod
    def __new__(cls, same: Tensor, is_uniform: bool = True) -> "UniformLogits":
        logits = Tensor._make_wrapper_subclass(cls, same.shape, dtype=same.dtype, device=same.device)
        logits.same, logits.is_uniform = same, is_uniform
        return logits

    @classmethod
    def of(cls, column: Tensor, width: int) -> "UniformLogits":
        """Return logits (..., width) that are all ``column`` (..., 1)."""
        return cls(column.expand(*column.shape[:-1], width))

    # Without memory of its own, what reads that of a tensor has to be told where it is.

    def __repr__(self) -> str:  # type: ignore[override]
        return f"UniformLogits({self.same})"

    def numpy(self, **options: Any) -> Any:
        return self.same.numpy(**options)

    def tolist(self) -> Any:
        return self.same.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, function = kwargs or {}, func.overloadpacket
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        uniform = all(t.is_uniform if isinstance(t, cls) else t.shape[-1:] in ((), (1,)) for t in tensors)
        written = args[0] if function.__name__.endswith("_") else None
        if func.is_view:
            made = func(*_same(args), **kwargs)
            return tree_map_only(Tensor, lambda t: cls(t, uniform and 0 in t.stride()), made)
        if (torch.Tag.pointwise in func.tags or function in _POINTWISE) and isinstance(written, cls | None):
            shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
            args, kwargs = tree_map_only(Tensor, column_of, (args, kwargs))
            made = func(*args, **kwargs)
            if written is None:
                return cls(made.expand(shape), uniform)
            return written if uniform else written.fill_(torch.nan)
        if _is_by_row(function, args):
            width = (args[0] if isinstance(args[0], Tensor) else args[0][0]).shape[-1]
            return cls.of(func(*tree_map_only(cls, column_of, args), **kwargs), width)
        if function is aten.new_empty_strided and tuple(args[1]) == tuple(args[0].shape):
            return torch.empty_like(args[0])
        if function is aten.slice_backward and 0 in args[0].same.stride()[-1:]:
            gradient, shape, *part = args
            whole = gradient.same.new_zeros(*shape[:-1], 1).expand(shape)
            column_of(cls(aten.slice(whole, *part))).copy_(column_of(gradient))
            return cls(whole)
        made = func(*_same(args), **_same(kwargs))
        if function.__name__.startswith("new_"):
            return made
        return tree_map_only(Tensor, lambda t: cls(t, False) if t.ndim else t, made)


def column_of(logits: Tensor) -> Tensor:
    """Return one column (..., 1) of logits (..., V), which shares their memory."""
    if isinstance(logits, UniformLogits) and 0 in logits.same.stride():
        return logits.same[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in logits.same.stride())]
    plain = _same(logits)
    return plain[..., :1] if plain.ndim else plain


def _same(arguments: Any) -> Any:
    return tree_map_only(UniformLogits, lambda logits: logits.same, arguments)


def _is_by_row(function: Any, args: Any) -> bool:
    """Return whether a function puts whole rows of uniform logits in another order or together."""
    rows = args[0] if isinstance(args[0], list | tuple) else args[:1]
    if not all(getattr(row, "is_uniform", False) for row in rows):
        return False
    ndim, place = rows[0].ndim + (function is aten.stack), _DIMENSIONS.get(function)
    if place is None:
        return function is aten.index and len(args[1]) < ndim
    dims = args[place] if len(args) > place else 0
    return all((dim + 1) % ndim for dim in (dims if isinstance(dims, list | tuple) else [dims]))
