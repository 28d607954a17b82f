"""Objectives beside next-token cross entropy, as losses of the scores of tokens, and so without logits."""

from lit_fused.objectives.distillation import DistillationLoss
from lit_fused.objectives.policy_loss import PolicyLoss
from lit_fused.objectives.preference_loss import PreferenceLoss
from lit_fused.objectives.scored import ScoredLoss

__all__ = ["DistillationLoss", "PolicyLoss", "PreferenceLoss", "ScoredLoss"]
