"""Parallelism beyond copies of the model: how it is divided over ranks so that the loss stays exact."""

from lit_fused.parallel.choosing import is_whole, placement_class, placement_of
from lit_fused.parallel.collectives import OnTheWay, are_finite, clip_to_norm, gradients_of, local, total_norm
from lit_fused.parallel.collectives import warn_of_repeated_rows as warn_of_repeated_rows
from lit_fused.parallel.pipeline.division import is_divided
from lit_fused.parallel.pipeline.strategy import PipelineStrategy
from lit_fused.parallel.placement import Placement, reshard
from lit_fused.parallel.sharded import block_wrap_policy
from lit_fused.parallel.strategies import FSDP1Strategy, FSDP2Strategy, MovableCheckpoints
