"""Weights that come late: from a seed or a checkpoint, once a strategy has divided the model."""

from lit_fused.weights.deferred import comes_late, from_config, from_pretrained, is_deferred, materialize

__all__ = ["comes_late", "from_config", "from_pretrained", "is_deferred", "materialize"]
