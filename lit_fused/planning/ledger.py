"""Count the memory that tensors take, without taking any: what is allocated, what for, and the most at a time.

A machine without CUDA cannot run autograd on fake CUDA tensors, so they are fake CPU tensors, under the CPU's autocast.
Some functions allocate differently on a GPU, and are replaced by what they do there: attention, dropout, products of
experts, and what CUDA's autocast runs in float32.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_HALVES = (torch.float16, torch.bfloat16)
_BLOCK = 512  # bytes; the caching allocator rounds up to multiples of it

WEIGHTS, CAST_WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "weights cast", "gradients", "optimizer state"
ACTIVATIONS, HEAD, TEMPORARY = "activations", "output head", "temporary"
GATHERED, WORKSPACE, FROZEN = "gathered weights", "cuBLAS workspace", "frozen model"
HOST = "host"  # what is copied to the host's memory, which counts nothing of the GPU's
COMPONENTS = (WEIGHTS, FROZEN, CAST_WEIGHTS, GATHERED, GRADIENTS, OPTIMIZER, ACTIVATIONS, HEAD, TEMPORARY, WORKSPACE)


@dataclass(slots=True)
class _Entry:
    heading: str
    size: int
    holds: bool = False  # It is a result of torch.all, taken to be True.


class MemoryLedger(TorchDispatchMode):
    """A mode, used inside of a ``FakeTensorMode``, that enters the size of every storage that operators make.

    Autograd keeps and frees fake tensors, which have a size and no bytes, exactly as real ones. A storage is entered by
    the size that CUDA's caching allocator would give it, under the heading of the moment, and struck out when its last
    tensor is gone. Tensors whose last dimension has the size ``vocabulary`` are logits: they are the output head's.

    Attributes:
        live: bytes that are allocated now, by component.
        peak: the same at the moment when most were allocated since :meth:`start_phase`.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.heading, self._share = vocabulary, WEIGHTS, 1.0
        self.live, self.peak = Counter[str](), Counter[str]()
        self._entries: dict[int, _Entry] = {}
        self._total = self._highest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags and len(args) == 1:
            return self._scalar(args[0])
        kept = self._all_kept(func, args)
        out: Any = func(*args, **(kwargs or {})) if kept is None else kept
        heading = self.heading
        given = args[0] if args else None
        if isinstance(given, Tensor) and isinstance(out, Tensor) and given.dtype != out.dtype:
            copied = self._entry(given) if given.shape == out.shape else None
            heading = CAST_WEIGHTS if copied is not None and copied.heading == WEIGHTS else heading
        for result in out if isinstance(out, tuple | list) else (out,):
            if isinstance(result, Tensor):
                self._enter(result, heading)
            if func is torch.ops.aten.all.default:
                self._entries[id(result.untyped_storage())].holds = True
        return out

    @contextmanager
    def under(self, heading: str, share: float = 1.0) -> Iterator[None]:
        """Enter what is allocated within the block under ``heading``: a ``share`` of it, a device's part."""
        outer = self.heading, self._share
        self.heading, self._share = heading, share
        try:
            yield
        finally:
            self.heading, self._share = outer

    def move(self, tensor: Tensor, heading: str, share: float = 1.0) -> None:
        """Move a tensor to ``heading`` once its kind is known (e.g. a gradient); a device keeps ``share`` of it."""
        entry = self._entry(tensor)
        if entry is not None and entry.heading != heading:
            size = self._rounded(entry.size * share)
            self.live[entry.heading] -= entry.size
            self.live[heading] += size
            self._total += size - entry.size
            entry.heading, entry.size = heading, size

    @staticmethod
    def _rounded(size: float) -> int:
        return math.ceil(size / _BLOCK) * _BLOCK

    def start_phase(self) -> None:
        """Take what is allocated now as the highest."""
        self._highest, self.peak = self._total, Counter(self.live)

    def _all_kept(self, func: Any, args: Any) -> Tensor | None:
        """Return what indexing makes of a mask that keeps all entries; None for any other operator."""
        if func is torch.ops.aten.index.Tensor and len(args[1]) == 1 and args[1][0].dtype == torch.bool:
            tensor, (mask,) = args
            return tensor.new_empty(mask.numel(), *tensor.shape[mask.ndim :])
        return None

    def _scalar(self, tensor: Tensor) -> bool | int | float:
        """Return a value for ``.item()`` of a fake tensor: one that lets checks pass and that can be divided by."""
        if tensor.dtype == torch.bool:
            entry = self._entry(tensor)
            return entry is not None and entry.holds
        return 1.0 if tensor.dtype.is_floating_point else 0

    def _entry(self, tensor: Tensor) -> _Entry | None:
        return self._entries.get(id(tensor.untyped_storage()))

    def _enter(self, tensor: Tensor, heading: str) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._entries:
            return
        size = 0 if heading == HOST else self._rounded(storage.nbytes() * self._share)
        if heading in (ACTIVATIONS, TEMPORARY) and tensor.ndim > 1 and tensor.shape[-1] == self.vocabulary:
            heading = HEAD
        self._entries[key] = _Entry(heading, size)
        weakref.finalize(storage, self._strike_out, key)
        self.live[heading] += size
        self._total += size
        if self._total >= self._highest:
            self._highest, self.peak = self._total, Counter(self.live)

    def _strike_out(self, key: int) -> None:
        entry = self._entries.pop(key)
        self.live[entry.heading] -= entry.size
        self._total -= entry.size


class CudaFunctions(TorchFunctionMode):
    """A mode in which functions allocate as they do on a GPU."""

    def __enter__(self) -> "CudaFunctions":
        # No mode sees this function, and in float32 it takes no fake tensors.
        self._products = mock.patch.object(F, "grouped_mm", _grouped_product)
        self._products.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._products.stop()

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


def run_backward(output: Tensor, gradient: Tensor) -> None:
    """Run backward so that the modes that are on see it, with all that a checkpoint computes again in it. They do not
    see what runs in a torch function, as ``output.backward()`` is one; the engine takes those that are on here."""
    torch.autograd.graph._engine_run_backward((output,), (gradient,), False, False, (), True, True)


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
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, key, value, attn_mask, *rest, **options)
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


def _grouped_product(rows: Tensor, matrices: Tensor, **_: Any) -> Any:
    return _GroupedProduct.apply(rows, matrices)


class _GroupedProduct(torch.autograd.Function):
    """Rows (S, D) times each expert's own matrix of (E, D, F)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows, matrices)
        return rows.new_empty(len(rows), matrices.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        rows, matrices = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(matrices)


_REPLACED: dict[Any, Callable[..., Tensor]] = {
    F.scaled_dot_product_attention: _attention,
    F.dropout: lambda input, p=0.5, training=True, inplace=False: (
        torch.native_dropout(input, p, True)[0] if training and p else input
    ),
}
