"""Pipeline parallelism: a decoder's layers divided over ranks, between which micro-batches travel."""

from lit_fused.parallel.pipeline.strategy import PipelineStrategy

__all__ = ["PipelineStrategy"]
