"""Parallelism beyond copies of the model: how it is divided over ranks so that the loss stays exact."""

from lit_fused.parallel.clipping import clip_by_norm, local, total_norm
from lit_fused.parallel.fsdp import (
    block_wrap_policy,
    blocks,
    check_units,
    reshard,
    shard,
    whole_parameters,
    whole_state_dict,
)
from lit_fused.parallel.groups import data_parallel_group, data_parallel_size, divides_without_weights

__all__ = [
    "block_wrap_policy",
    "blocks",
    "check_units",
    "clip_by_norm",
    "data_parallel_group",
    "data_parallel_size",
    "divides_without_weights",
    "local",
    "reshard",
    "shard",
    "total_norm",
    "whole_parameters",
    "whole_state_dict",
]
