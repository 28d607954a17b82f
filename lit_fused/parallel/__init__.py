"""Parallelism beyond copies of the model: how it is divided over ranks so that the loss stays exact."""

from typing import Any

from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy

from lit_fused.parallel.checkpoint import read_weights as read_weights
from lit_fused.parallel.collectives import (
    HostCopy,
    are_finite,
    clip_to_norm,
    clip_to_value,
    gradients_of,
    local,
    on_device,
    total_norm,
)
from lit_fused.parallel.placement import OneDevice, Placement, Replicated, reshard
from lit_fused.parallel.replicas import ReplicatedStrategy as ReplicatedStrategy
from lit_fused.parallel.samplers import warn_of_repeated_rows as warn_of_repeated_rows
from lit_fused.parallel.sharded import Sharded
from lit_fused.parallel.strategies import FSDP2Strategy as FSDP2Strategy

_CLASSES: tuple[tuple[type[Strategy], type[Placement]], ...] = (
    (SingleDeviceStrategy, OneDevice),
    (DDPStrategy, Replicated),
    (ModelParallelStrategy, Sharded),
)


def placement_class(strategy: type[Strategy]) -> type[Placement] | None:
    """Return the class of the placements of a class of strategies: the one that it names as its ``placement_class``, or
    that of one device, DDP or Lightning's model-parallel strategy; None for strategies that are not supported."""
    own = getattr(strategy, "placement_class", None)
    return own or next((placement for kind, placement in _CLASSES if issubclass(strategy, kind)), None)


def placement_of(strategy: Strategy | None) -> Placement:
    """Return the strategy's placement, always the same one; for None, a model without a trainer, one device's."""
    if strategy is None:
        return OneDevice(None)
    known: Any = strategy
    if not hasattr(known, "placement"):
        kind = placement_class(type(strategy)) or Replicated  # It refuses any strategy but DDP.
        known.placement = kind(strategy)
    return known.placement
