"""Which ranks train on different data. Sums over a step are sums over those alone: ranks that share a batch, each with
a part of the model, have the same ones."""

import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy


def data_parallel_size(strategy: Strategy) -> int:
    """The number of different micro-batches that are trained on at the same time."""
    if isinstance(strategy, ModelParallelStrategy):
        return strategy.device_mesh["data_parallel"].size()
    return getattr(strategy, "world_size", 1)


def divides_without_weights(strategy: Strategy) -> bool:
    """Whether the model is divided, and its output layer identified, as well before its weights have come. Elsewhere
    every process builds it whole."""
    return not isinstance(strategy, ModelParallelStrategy) or strategy.device_mesh["tensor_parallel"].size() == 1


def data_parallel_group(strategy: Strategy) -> dist.ProcessGroup | None:
    """The ranks that have them; None is all ranks."""
    if isinstance(strategy, ModelParallelStrategy):
        return strategy.device_mesh["data_parallel"].get_group()
    return None
