"""Cross entropy of a linear output layer without its logits. It needs torch alone, and Triton on GPUs."""

from lit_fused.ops.linear_cross_entropy import linear_cross_entropy
from lit_fused.ops.reference import linear_cross_entropy_reference, token_scores_reference
from lit_fused.ops.token_scores import TokenScores, token_scores

__all__ = [
    "TokenScores",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "token_scores",
    "token_scores_reference",
]
