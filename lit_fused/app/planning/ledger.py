"""Count the memory that tensors take, without taking any: what is allocated, what for, and the most at a time."""

import math
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_BLOCK = 512  # bytes; the caching allocator rounds up to multiples of it

WEIGHTS, CAST_WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "weights cast", "gradients", "optimizer state"
ACTIVATIONS, HEAD, TEMPORARY = "activations", "output head", "temporary"
GATHERED, WORKSPACE = "gathered weights", "cuBLAS workspace"
COMPONENTS = (WEIGHTS, CAST_WEIGHTS, GATHERED, GRADIENTS, OPTIMIZER, ACTIVATIONS, HEAD, TEMPORARY, WORKSPACE)


@dataclass(slots=True)
class _Entry:
    heading: str
    size: int
    holds: bool = False  # whether it is a result of torch.all, which is taken to be True


class MemoryLedger(TorchDispatchMode):
    """A mode, used inside of a ``FakeTensorMode``, that enters the size of every storage that operators make.

    Fake tensors have a storage of a size and no bytes. Autograd keeps and frees them exactly as real ones. So a step on
    them allocates and frees what the real step would. A storage is entered by the size that CUDA's caching allocator
    would give it, under the heading of the moment. A finaliser strikes it out when its last tensor is gone. Tensors
    whose last dimension has the size ``vocabulary`` are logits, and belong to the output head.

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
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._scalar(args[0])
        out = func(*args, **(kwargs or {}))
        heading = self.heading
        if func is torch.ops.aten._to_copy.default and (copied := self._entry(args[0])) and copied.heading == WEIGHTS:
            heading = CAST_WEIGHTS
        for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._enter(leaf, heading)
        if func is torch.ops.aten.all.default:
            self._entries[out.untyped_storage()._cdata].holds = True
        return out

    def under(self, heading: str) -> AbstractContextManager[None]:
        """Enter what is allocated within the block under ``heading``."""
        return self._with(heading, self._share)

    def divided(self, share: float) -> AbstractContextManager[None]:
        """Count only this share of what is allocated within the block: a device's part."""
        return self._with(self.heading, share)

    @contextmanager
    def _with(self, heading: str, share: float) -> Iterator[None]:
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

    def _scalar(self, tensor: Tensor) -> bool | int | float:
        """Return a value for ``.item()`` of a fake tensor: one that lets checks pass and that can be divided by."""
        if tensor.dtype == torch.bool:
            entry = self._entry(tensor)
            return entry is not None and entry.holds
        return 1.0 if tensor.dtype.is_floating_point else 0

    def _entry(self, tensor: Tensor) -> _Entry | None:
        return self._entries.get(tensor.untyped_storage()._cdata)

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
        self.live[heading] += size
        self._total += size
        if self._total >= self._highest:
            self._highest, self.peak = self._total, Counter(self.live)

    def _strike_out(self, key: int) -> None:
        entry = self._entries.pop(key)
        self.live[entry.heading] -= entry.size
        self._total -= entry.size
