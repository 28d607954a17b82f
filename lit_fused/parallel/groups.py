"""Which ranks train on different data. Sums over a step are sums over those alone: ranks that share a batch, each with
a part of the model, have the same ones."""

import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
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


def tensor_parallel_mesh(strategy: Strategy | None) -> DeviceMesh | None:
    """The ranks that compute every token together; None where each rank computes its own."""
    if not isinstance(strategy, ModelParallelStrategy):
        return None
    mesh = strategy.device_mesh
    if "tensor_parallel" not in (mesh.mesh_dim_names or ()) or mesh["tensor_parallel"].size() == 1:
        return None
    return mesh["tensor_parallel"]
