"""Weights that come late: from a seed or a checkpoint, once a strategy has divided the model."""

from lit_fused.weights.deferred import from_config, from_pretrained, is_deferred, materialize

__all__ = ["from_config", "from_pretrained", "is_deferred", "materialize"]
