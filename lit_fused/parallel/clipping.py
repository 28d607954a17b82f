"""Clip gradients that are sharded over meshes of ranks by their total norm.

Each parameter counts once. The squares of a shard are summed over the mesh dimensions that it is sharded on; a tensor
that is the same on several ranks is not summed over them. The stages of a pipeline have different parameters, so there
the squares are summed over its ranks as well.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a distributed tensor, a view of it; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def total_norm(gradients: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the Euclidean norm of all gradients together, () float32, the same on every rank.

    Args:
        gradients: of this rank.
        group: ranks that have the gradients of other parameters.
    """
    groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        sharded_over: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(gradient, DTensor):
            assert not any(p.is_partial() for p in gradient.placements), "a gradient that is not summed yet"
            placements = enumerate(gradient.placements)
            sharded_over = tuple(gradient.device_mesh.get_group(i) for i, p in placements if not p.is_replicate())
        groups[sharded_over].append(local(gradient))
    total = torch.zeros((), dtype=torch.float32)
    for sharded_over, parts in groups.items():
        norms = torch._foreach_norm(parts, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
        square = torch.stack(norms).square().sum()
        for ranks in sharded_over:
            dist.all_reduce(square, group=ranks)
        total = total.to(square.device) + square
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def clip_by_norm(
    gradients: list[Tensor],
    max_norm: float,
    *,
    counted: Iterable[Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``; return the norm before.

    Args:
        gradients: of this rank.
        counted: the gradients that make up the norm; by default all. Another rank counts the others, which are copies.
        group: ranks that have the gradients of other parameters.
    """
    norm = total_norm(gradients if counted is None else counted, group)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([local(g) for g in gradients], factor)  # pyright: ignore[reportPrivateImportUsage]
    return norm
