"""Loss strategies: a language model's forward pass in, sums and counts out."""

from lit_fused.losses.fused import LinearCrossEntropyLoss
from lit_fused.losses.loss import ForwardPass, Loss, LossOutput, as_loss, shift_labels
from lit_fused.losses.model_internal import ModelInternalLoss
from lit_fused.losses.standard import CrossEntropyLoss

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
