"""Pipeline parallelism: a decoder's layers divided over ranks, between which micro-batches travel.

No other room knows this one: ``Trainer(strategy=PipelineStrategy(2))`` or ``strategy=pp`` names it, and the strategy
names its own placement.
"""

from lit_fused.pipeline.strategy import PipelineStrategy as PipelineStrategy
