"""Which ranks train on different data, and what they tell each other once per step.

Sums over a step are sums over those ranks alone: ranks that share a batch, each with a part of the model, have the same
ones. The collectives here are plain ones, which a GPU does in its own time; Lightning's wait for every rank before.
"""

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


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
