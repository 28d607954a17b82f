"""Counts the memory that tensors take, without taking any: what is allocated, what for, and the most at a time.

Fake tensors (``FakeTensorMode``) have a storage of a size and no bytes. They come into being, are kept by autograd and
are freed exactly as real ones are. So a training step that is run on them, backward and optimiser included, allocates
and frees what the real one would. The ledger stands between the program and the fake operators: every new storage is
entered, by the size that CUDA's caching allocator would give it, under the heading of the moment, and struck out
by a finaliser when its last tensor is gone.
"""

import math
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_BLOCK = 512  # bytes: what the caching allocator rounds up to

WEIGHTS, CAST_WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "weights cast", "gradients", "optimizer state"
ACTIVATIONS, HEAD, TEMPORARY = "activations", "output head", "temporary"
GATHERED, WORKSPACE = "gathered weights", "cuBLAS workspace"
COMPONENTS = (WEIGHTS, CAST_WEIGHTS, GATHERED, GRADIENTS, OPTIMIZER, ACTIVATIONS, HEAD, TEMPORARY, WORKSPACE)


class _Entry:
    __slots__ = ("heading", "holds", "size")

    def __init__(self, heading: str, size: int) -> None:
        self.heading, self.size = heading, size
        self.holds = False  # whether it is an answer to "do all ...?"


class MemoryLedger(TorchDispatchMode):
    """Entered after a ``FakeTensorMode``, enters every storage that operators make.

    Args:
        vocabulary: tensors whose last dimension has this size are logits, and belong to the output head.

    Attributes:
        peak: bytes by component at the moment when most were allocated since :meth:`start_phase`.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.heading = WEIGHTS
        self._share = 1.0
        self.peak: Counter[str] = Counter()
        self._entries: dict[int, _Entry] = {}
        self._live: Counter[str] = Counter()
        self._total = self._highest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._scalar(args[0])
        out = func(*args, **(kwargs or {}))
        heading = self.heading
        if func is torch.ops.aten._to_copy.default and self._is_weight(args[0]):
            heading = CAST_WEIGHTS
        for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._enter(leaf, heading)
        if func is torch.ops.aten.all.default:
            self._entries[out.untyped_storage()._cdata].holds = True
        return out

    @contextmanager
    def under(self, heading: str) -> Iterator[None]:
        """Enter what is allocated within the block under ``heading``."""
        outer, self.heading = self.heading, heading
        try:
            yield
        finally:
            self.heading = outer

    @contextmanager
    def divided(self, share: float) -> Iterator[None]:
        """Count only this share of what is allocated within the block: a device's part."""
        outer, self._share = self._share, share
        try:
            yield
        finally:
            self._share = outer

    def move(self, tensor: Tensor, heading: str, share: float = 1.0) -> None:
        """Move a tensor to ``heading`` once it is known what it is, such as a gradient or an optimiser's state.

        A device keeps ``share`` of it.
        """
        entry = self._entries.get(tensor.untyped_storage()._cdata)
        if entry is not None and entry.heading != heading:
            size = self._rounded(entry.size * share)
            self._live[entry.heading] -= entry.size
            self._live[heading] += size
            self._total += size - entry.size
            entry.heading, entry.size = heading, size

    @staticmethod
    def _rounded(size: float) -> int:
        return math.ceil(size / _BLOCK) * _BLOCK

    def start_phase(self) -> None:
        """The highest since now is what is allocated now."""
        self._highest, self.peak = self._total, Counter(self._live)

    @property
    def live(self) -> Counter[str]:
        """Bytes that are allocated now, by component."""
        return Counter(self._live)

    def _scalar(self, tensor: Tensor) -> bool | int | float:
        """Return a value for ``.item()`` of a fake tensor: one that lets checks pass and that can be divided by."""
        if tensor.dtype == torch.bool:
            entry = self._entries.get(tensor.untyped_storage()._cdata)
            return entry is not None and entry.holds
        return 1.0 if tensor.dtype.is_floating_point else 0

    def _is_weight(self, tensor: Tensor) -> bool:
        entry = self._entries.get(tensor.untyped_storage()._cdata)
        return entry is not None and entry.heading == WEIGHTS

    def _enter(self, tensor: Tensor, heading: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._entries:
            return
        size = self._rounded(storage.nbytes() * self._share)
        if heading in (ACTIVATIONS, TEMPORARY) and tensor.ndim > 1 and tensor.shape[-1] == self.vocabulary:
            heading = HEAD
        self._entries[key] = _Entry(heading, size)
        weakref.finalize(storage, self._strike_out, key)
        self._live[heading] += size
        self._total += size
        if self._total >= self._highest:
            self._highest, self.peak = self._total, Counter(self._live)

    def _strike_out(self, key: int) -> None:
        entry = self._entries.pop(key)
        self._live[entry.heading] -= entry.size
        self._total -= entry.size
