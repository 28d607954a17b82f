"""Loss strategies: a language model's forward pass in, sums and counts out."""

from lit_fused.losses.fused import LinearCrossEntropyLoss
from lit_fused.losses.loss import Forward, Head, Loss, LossOutput, shift_labels
from lit_fused.losses.own_losses import ModelInternalLoss, as_loss
from lit_fused.losses.standard import CrossEntropyLoss

__all__ = [
    "CrossEntropyLoss",
    "Forward",
    "Head",
    "LinearCrossEntropyLoss",
    "Loss",
    "LossOutput",
    "ModelInternalLoss",
    "as_loss",
    "shift_labels",
]
