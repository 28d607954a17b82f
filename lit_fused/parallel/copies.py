"""Compare what several ranks have copies of."""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_fused.errors import UserError


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
    of_ranks: list[dict[str, list[float]]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, mine, group=group)
    for name, (total, norm) in of_ranks[0].items():
        for other in of_ranks:
            same = math.isclose(other[name][1], norm, rel_tol=1e-9)
            if not same or abs(other[name][0] - total) > 1e-9 * max(norm, 1) * max(parts[name].numel(), 1) ** 0.5:
                raise UserError(
                    f"ranks that share {name} began with different numbers in it; build the model with the same seed, "
                    "or from the same checkpoint, on every rank"
                )
