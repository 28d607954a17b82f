"""Clip gradients by a norm over all ranks, and compare what several ranks have copies of.

Each parameter counts once. The squares of a shard are summed over the mesh dimensions that it is sharded on; a tensor
that is the same on several ranks is not summed over them. Where ranks have different parameters, the
squares are summed over its ranks as well.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lit_fused.errors import UserError


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a distributed tensor, a view of it; a plain tensor as it is.

    Unless gradients are disabled, it makes a node of an autograd graph, which takes the host ten times as long.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def send_weights(model: nn.Module, device: torch.device) -> None:
    """Give all ranks the first one's parameters and buffers, in place, by way of ``device``."""
    for tensor in [*model.parameters(), *model.buffers()]:
        sent = tensor.detach().to(device).contiguous()
        dist.broadcast(sent, src=0)
        tensor.detach().copy_(sent)


def gradients_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the gradients of the parameters that some optimisers have, each once. Others may be left from before."""
    parameters = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
    return [p.grad for p in parameters.values() if p.grad is not None]


def _norm(tensor: Tensor) -> Tensor:
    exact = torch.promote_types(tensor.dtype, torch.float32)  # The norm of float16 numbers may be too large for it.
    return torch.linalg.vector_norm(tensor, dtype=exact)


def _norm_of(tensors: list[Tensor]) -> Tensor:
    tensors = [t.coalesce().values() if t.is_sparse else t for t in tensors]  # of nn.Embedding(..., sparse=True)
    if any(t.dtype.itemsize < 4 for t in tensors):
        return _norm(torch.stack(list(map(_norm, tensors))))
    return get_total_norm(tensors)  # few launches for all of them


def are_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return, for each of some tensors, whether it is finite, on their device: by its norm, which is fast to take."""
    return torch.stack(list(map(_norm, tensors))).isfinite()


def on_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Return numbers of the CPU on a device, without waiting for what it does."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


class HostCopy:
    """An asynchronous copy of some numbers, (n,), to the host: the device waits for nothing if it is read later.

    ``over_ranks`` copies the largest numbers of all ranks, each of which has to make the copy at the same time.
    """

    def __init__(self, numbers: Tensor, *, over_ranks: bool = True) -> None:
        if over_ranks and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(numbers, dist.ReduceOp.MAX)
        self._event = torch.cuda.Event() if numbers.is_cuda else None
        if self._event is not None:
            numbers = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
            self._event.record()
        self._numbers = numbers

    def read(self) -> list[Any]:
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()


@torch.no_grad()
def total_norm(gradients: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the Euclidean norm of all gradients together, () float32 (of float64 gradients float64), the same on
    every rank. ``gradients`` are those of this rank; the ranks of ``group`` have those of other parameters."""
    # By a mesh, and whether each of its dimensions divides them.
    groups: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        placed: tuple[Any, ...] = ()
        if isinstance(gradient, DTensor):
            assert not any(p.is_partial() for p in gradient.placements), "a gradient that is not summed yet"
            placed = gradient.device_mesh, *(not p.is_replicate() for p in gradient.placements)
        groups[placed].append(local(gradient))
    squares: list[Tensor] = []
    for placed, parts in groups.items():
        square = _norm_of(parts).square()
        for dimension, divides in enumerate(placed[1:]):
            if divides:
                dist.all_reduce(square, group=placed[0].get_group(dimension))
        squares.append(square)
    total = torch.stack(squares).sum() if squares else torch.zeros(())
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt()


@torch.no_grad()
def clip_to_norm(gradients: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale this rank's gradients, whose total norm is ``norm``, in place so that it becomes at most ``max_norm``."""
    if parts := [local(g) for g in gradients]:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(parts, factor)  # pyright: ignore[reportPrivateImportUsage]


@torch.no_grad()
def clip_to_value(gradients: Iterable[Tensor], limit: float) -> None:
    """Clip each number of this rank's gradients, in place, to [-limit, limit]."""
    for gradient in gradients:
        local(gradient).clamp_(-limit, limit)


def objects_of_ranks(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    objects: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(objects, own, group=group)
    return objects


def check_same_batch(batch: Mapping[str, Any], group: dist.ProcessGroup, ranks: str) -> None:
    """Raise UserError on all ranks that work on one batch together (``ranks`` names them) unless it is the same."""
    own: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, Tensor):  # A slice has gaps, and its bytes no view.
            numbers = value.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
            own[name] = tuple(value.shape), zlib.crc32(numbers.view(torch.uint8).numpy().tobytes())
    if any(other != own for other in objects_of_ranks(own, group)):
        raise UserError(
            f"{ranks} got different batches: leave the sampler to Lightning (use_distributed_sampler=True), or give "
            "your own the data-parallel rank (device_mesh['data_parallel']); a loader that shuffles needs the same "
            "seed on every rank (lightning.seed_everything)"
        )
