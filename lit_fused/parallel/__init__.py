"""Parallelism beyond copies of the model: how it is divided over ranks so that the loss stays exact."""

from lit_fused.parallel.clipping import clip_by_norm, local, total_norm
from lit_fused.parallel.fsdp import (
    block_wrap_policy,
    blocks,
    check_units,
    reshard,
    runs_outside_of_the_root,
    shard,
    whole_parameters,
    whole_state_dict,
)
from lit_fused.parallel.groups import (
    data_parallel_group,
    data_parallel_size,
    from_all_ranks,
    sum_over_data,
    tensor_parallel_mesh,
)
from lit_fused.parallel.pipeline import PipelineStrategy
from lit_fused.parallel.strategies import FSDP1Strategy, FSDP2Strategy, MovableCheckpoints
from lit_fused.parallel.tensor import (
    check_copied_numbers,
    check_division,
    check_same_batch,
    parallelize,
    same_random_numbers,
)

__all__ = [
    "FSDP1Strategy",
    "FSDP2Strategy",
    "MovableCheckpoints",
    "PipelineStrategy",
    "block_wrap_policy",
    "blocks",
    "check_copied_numbers",
    "check_division",
    "check_same_batch",
    "check_units",
    "clip_by_norm",
    "data_parallel_group",
    "data_parallel_size",
    "from_all_ranks",
    "local",
    "parallelize",
    "reshard",
    "runs_outside_of_the_root",
    "same_random_numbers",
    "shard",
    "sum_over_data",
    "tensor_parallel_mesh",
    "total_norm",
    "whole_parameters",
    "whole_state_dict",
]
