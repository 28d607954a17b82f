"""Which ranks train on different data, and what they tell each other once per step.

Sums over a step are sums over those ranks alone: ranks that share a batch, each with a part of the model, have the same
ones. The collectives here are plain ones, which a GPU does in its own time; Lightning's wait for every rank before.
"""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lit_fused.errors import UserError


def data_parallel_size(strategy: Strategy) -> int:
    """The number of different micro-batches that are trained on at the same time."""
    if isinstance(strategy, ModelParallelStrategy):
        return strategy.device_mesh["data_parallel"].size()
    return getattr(strategy, "world_size", 1)


def data_parallel_group(strategy: Strategy) -> dist.ProcessGroup | None:
    """The ranks that have them; None is all ranks."""
    if isinstance(strategy, ModelParallelStrategy):
        return strategy.device_mesh["data_parallel"].get_group()
    return None


def sum_over_data(tensor: Tensor, strategy: Strategy) -> Tensor:
    """The sum over the ranks that train on different data, the same on all of them."""
    if data_parallel_size(strategy) > 1:
        tensor = tensor.clone()
        dist.all_reduce(tensor, group=data_parallel_group(strategy))
    return tensor


def from_all_ranks(tensor: Tensor, strategy: Strategy) -> Tensor:
    """(ranks, ...): the tensor of every rank, on every rank."""
    world_size = getattr(strategy, "world_size", 1)
    if world_size == 1:
        return tensor[None]
    gathered = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(gathered, tensor)
    return torch.stack(gathered)


def tensor_parallel_mesh(strategy: Strategy | None) -> DeviceMesh | None:
    """The ranks that compute every token together; None where each rank computes its own."""
    if not isinstance(strategy, ModelParallelStrategy):
        return None
    mesh = strategy.device_mesh
    if "tensor_parallel" not in (mesh.mesh_dim_names or ()) or mesh["tensor_parallel"].size() == 1:
        return None
    return mesh["tensor_parallel"]


def check_copies(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Compare sum and norm of tensors (of a DTensor, the part that is here), of which all ranks of ``group`` have
    copies.

    Raises:
        UserError: on all ranks, if those of one differ.
    """
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
