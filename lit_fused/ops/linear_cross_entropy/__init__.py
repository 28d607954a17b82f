"""Cross entropy of a linear output layer, from its input and its weight, without ever building the logits."""

from lit_fused.ops.linear_cross_entropy.chunked import linear_cross_entropy
from lit_fused.ops.linear_cross_entropy.reference import linear_cross_entropy_reference

__all__ = ["linear_cross_entropy", "linear_cross_entropy_reference"]
