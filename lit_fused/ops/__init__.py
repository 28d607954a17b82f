"""Cross entropy of a linear output layer without its logits. It needs torch alone, and Triton on GPUs."""

from lit_fused.ops.linear_cross_entropy import linear_cross_entropy
from lit_fused.ops.linear_distillation import TeacherHead, linear_distillation
from lit_fused.ops.reference import (
    linear_cross_entropy_reference,
    linear_distillation_reference,
    token_scores_reference,
)
from lit_fused.ops.token_scores import TokenScores, token_scores
from lit_fused.ops.top_items import TopItems, top_items

__all__ = [
    "TeacherHead",
    "TokenScores",
    "TopItems",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "linear_distillation",
    "linear_distillation_reference",
    "token_scores",
    "token_scores_reference",
    "top_items",
]
