"""Parallelism beyond data parallel: how a model is divided over ranks so that the loss stays exact."""

from lit_fused.parallel.fsdp import blocks, shard

__all__ = ["blocks", "shard"]
