"""Build models without memory, and fill in their weights, from a seed or a checkpoint, once a strategy divided them."""

from lit_fused.weights.deferred import comes_late, from_config, from_pretrained, is_deferred, materialize
from lit_fused.weights.growth import Origin, grow_vocabulary, origin_of
from lit_fused.weights.location import locate
