"""Keep tensors in the memory of the host from forward to backward, and copy them beside the computation.

Forward keeps the inputs of layers 1, 2, ... n, and backward needs n, ... 2, 1. The copies run on a stream of their own.
While layer i computes, its input leaves; while backward of layer i computes, the input of layer i - 1 comes back. So a
GPU has at most two of them. transformers' own ``offload`` copies on the stream that computes, which waits for it.
"""

import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lit_fused.errors import UserError

_PIECE = 2**26  # bytes: torch rounds the size of pinned memory up to a power of two, so a tensor is kept in pieces
_CGROUP = Path("/sys/fs/cgroup")


class Kept:
    """A tensor on the host."""

    def __init__(self, tensor: Tensor, pieces: list[Tensor], before: "weakref.ref[Kept] | None") -> None:
        self.shape, self.dtype, self.device, self.pieces = tensor.shape, tensor.dtype, tensor.device, pieces
        self.before = before  # what was kept before: backward needs it next
        self.fetched: tuple[Tensor, Any] | None = None  # on the device again, and when the copy has ended

    def __del__(self) -> None:
        if self.fetched is not None:  # Its memory is given to others, who are to wait for the end of the copy.
            wait(self.fetched[1])


class HostInputs:
    """The tensors of a model that are kept on the host."""

    def __init__(self) -> None:
        self._newest: weakref.ref[Kept] | None = None
        self._leaving: tuple[Tensor, Any] | None = None  # the newest tensor, and when its copy has ended
        self._fits = 0  # bytes that the host was found to have

    def __reduce__(self) -> Any:
        return type(self), ()  # A copy of the model keeps its own.

    def keep(self, tensor: Tensor, count: int) -> Kept:
        """Copy one of ``count`` tensors of this size to the host; UserError if it has too little memory for them."""
        self._check(tensor.nbytes * count, count)
        tensor = tensor.detach()
        self._release()
        pieces, event = to_host(tensor)
        self._leaving = tensor, event
        kept = Kept(tensor, pieces, self._newest)
        self._newest = weakref.ref(kept)
        return kept

    def give(self, kept: Kept) -> Tensor:
        """Return a tensor on its device, and fetch the one that was kept before it."""
        self._release()
        tensor, event = kept.fetched or to_device(kept)
        kept.fetched = None
        wait(event)
        before = None if kept.before is None else kept.before()
        if before is not None and before.fetched is None:
            before.fetched = to_device(before)
        return tensor

    def _release(self) -> None:
        """Let the memory of the tensor that left last be used for something else, once its copy has ended."""
        if self._leaving is not None:
            wait(self._leaving[1])
            self._leaving = None

    def _check(self, needed: int, count: int) -> None:
        if needed <= self._fits:
            return
        ranks = 1
        if dist.is_available() and dist.is_initialized():  # each of this host keeps as much
            ranks = max(1, min(dist.get_world_size(), torch.cuda.device_count()))
        free = free_host_memory()
        if (needed - self._fits) * ranks > free:
            of_ranks = f" for each of {ranks} GPUs" if ranks > 1 else ""
            raise UserError(
                f'checkpointing="offload" keeps the inputs of {count} layers on the host: {needed / 2**30:.1f} GiB'
                f"{of_ranks}, and {free / 2**30:.1f} GiB are free; choose shorter rows, a smaller batch, or "
                'checkpointing="recompute" (memory=checkpoint)'
            )
        self._fits = needed


def to_host(tensor: Tensor) -> tuple[list[Tensor], Any]:
    """Return a copy on the host, in pieces, and the event of its end; None where it has ended."""
    if tensor.device.type != "cuda":
        return [tensor.to("cpu", copy=True)], None
    stream, pieces = _stream(tensor.device), []
    flat = tensor.contiguous().view(-1)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        for part in flat.split(_PIECE // flat.element_size()):
            pieces.append(torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=True))
            pieces[-1].copy_(part, non_blocking=True)
    if flat.data_ptr() != tensor.data_ptr():
        flat.record_stream(stream)
    return pieces, stream.record_event()


def to_device(kept: Kept) -> tuple[Tensor, Any]:
    """Return a copy on its device, in memory of the stream that computes now, and the event of the copy's end."""
    if kept.device.type != "cuda":
        return kept.pieces[0].to(kept.device), None
    stream = _stream(kept.device)
    tensor = torch.empty(kept.shape, dtype=kept.dtype, device=kept.device)
    stream.wait_stream(torch.cuda.current_stream(kept.device))  # It may still read what was there before.
    with torch.cuda.stream(stream):
        for part, piece in zip(tensor.view(-1).split(_PIECE // tensor.element_size()), kept.pieces, strict=True):
            part.copy_(piece, non_blocking=True)
    return tensor, stream.record_event()


def wait(event: Any) -> None:
    """Let the stream that computes wait for an event."""
    if event is not None:
        event.wait()


_streams: dict[torch.device, Any] = {}


def _stream(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def free_host_memory() -> int:
    """Return the bytes that programs can take on this host, or in this container if that is less."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, StopIteration):  # The free pages of sysconf leave out what only caches files.
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    with suppress(OSError, ValueError, StopIteration):  # ValueError: "max"
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        found.append(limit - used + int(next(line for line in lines if line.startswith("inactive_file ")).split()[1]))
    return max(0, min(found))
