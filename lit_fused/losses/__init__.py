"""Loss strategies: a language model's forward pass in, sums and counts out."""

from lit_fused.losses.base import ForwardPass, Loss, LossOutput, as_loss, shift_labels
from lit_fused.losses.cross_entropy import CrossEntropyLoss
from lit_fused.losses.linear_cross_entropy import LinearCrossEntropyLoss
from lit_fused.losses.model_internal import ModelInternalLoss

__all__ = [
    "CrossEntropyLoss",
    "ForwardPass",
    "LinearCrossEntropyLoss",
    "Loss",
    "LossOutput",
    "ModelInternalLoss",
    "as_loss",
    "shift_labels",
]
