"""Training loops of other libraries: one call gives their model a loss without logits."""

from lit_fused.integrations.fuse import fuse, unfuse

__all__ = ["fuse", "unfuse"]
