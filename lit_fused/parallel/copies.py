"""Compare what several ranks have copies of."""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_fused.errors import UserError


def objects_of_ranks(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the object of every rank of the group, on each of them."""
    objects: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(objects, own, group=group)
    return objects


def check_same_batch(batch: Mapping[str, Any], group: dist.ProcessGroup, ranks: str) -> None:
    """Compare the batches of ranks that work on one together. Waits for the batch and for the other ranks.

    Raises:
        UserError: on all ranks, if the batches differ; ``ranks`` says whose.
    """
    own = {
        name: (tuple(value.shape), zlib.crc32(value.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()))
        for name, value in batch.items()
        if isinstance(value, Tensor)
    }
    if any(other != own for other in objects_of_ranks(own, group)):
        raise UserError(
            f"{ranks} got different batches: leave the sampler to Lightning (use_distributed_sampler=True), or give "
            "your own the data-parallel rank (device_mesh['data_parallel']); a loader that shuffles needs the same "
            "seed on every rank (lightning.seed_everything)"
        )


def check_copies(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Compare, by their sums and norms, tensors of which all ranks of ``group`` should have equal copies.

    A DTensor's local part is compared.

    Raises:
        UserError: on all ranks, if a rank has other numbers.
    """
    if dist.get_world_size(group) == 1:
        return
    parts = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    mine = {
        name: [part.sum(dtype=torch.float64).item(), torch.linalg.vector_norm(part, dtype=torch.float64).item()]
        for name, part in parts.items()
    }
    of_ranks = objects_of_ranks(mine, group)
    for name, (total, norm) in of_ranks[0].items():
        for other in of_ranks:
            same = math.isclose(other[name][1], norm, rel_tol=1e-9)
            if not same or abs(other[name][0] - total) > 1e-9 * max(norm, 1) * max(parts[name].numel(), 1) ** 0.5:
                raise UserError(
                    f"ranks that share {name} began with different numbers in it; build the model with the same seed, "
                    "or from the same checkpoint, on every rank"
                )
