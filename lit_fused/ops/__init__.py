"""Cross entropy of a linear output layer without its logits. It needs torch alone, and Triton on GPUs."""

from lit_fused.ops.linear_cross_entropy import linear_cross_entropy
from lit_fused.ops.reference import linear_cross_entropy_reference

__all__ = ["linear_cross_entropy", "linear_cross_entropy_reference"]
