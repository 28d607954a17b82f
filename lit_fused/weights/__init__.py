"""Weights that come late: from a seed or a checkpoint, once a strategy has divided the model."""

from lit_fused.weights.deferred import comes_late, from_config, from_pretrained, is_deferred, materialize
from lit_fused.weights.location import locate
from lit_fused.weights.vocabulary import Origin, grow_vocabulary, origin_of

__all__ = [
    "Origin",
    "comes_late",
    "from_config",
    "from_pretrained",
    "grow_vocabulary",
    "is_deferred",
    "locate",
    "materialize",
    "origin_of",
]
