"""Losses that are not ours: the one that the model computes itself, and a function of the user's."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lit_fused.errors import UserError
from lit_fused.losses.loss import Batch, Forward, Loss, LossOutput, at_least_float32, has_shifted_labels, labels_of
from lit_fused.ops.label_checks import IGNORE_INDEX, check_one_per_position, check_range


class ModelInternalLoss(Loss):
    """The model's own, ``model(**batch, labels=labels).loss``, as a sum and a count: a reference, and for models whose
    loss is more than cross entropy. Refused where it pairs positions and labels otherwise than the module does."""

    builds_logits = True

    def prepare(self, model: Any, device: torch.device) -> None:
        model.prepare_own_loss()

    def compute(self, model: Any, batch: Batch) -> LossOutput:
        targets = model.targets(batch)
        num_tokens = (targets != IGNORE_INDEX).sum()
        try:
            loss, logits, aux_loss = model.own_loss(batch)
        except (IndexError, ValueError):  # cross entropy does not say which labels it cannot take
            logits, _ = model.logits(batch)
            check_one_per_position(targets, logits, "logits")
            check_range(targets, logits.shape[-1])
            raise
        check_one_per_position(targets, logits, "logits")  # the model would take as many labels in another order
        loss = at_least_float32(loss) if aux_loss is None else at_least_float32(loss) - aux_loss
        # The model's mean over no label is not a number.
        loss_sum = loss.where(num_tokens != 0, 0) * num_tokens
        return LossOutput(loss_sum, num_tokens, aux_loss, {"nll": loss_sum.detach()})


class CallableLoss(Loss):
    """A user's own ``f(hidden_states, labels) -> mean loss () over the valid targets``.

    It has to shift the batch's labels for a causal model, whose position t predicts label t + 1. For a batch without a
    valid target it should return zero, or the mean of ``F.cross_entropy``, whose gradient is zero; neither is counted.
    For batches with "shift_labels" it takes these as a keyword of this name.
    """

    builds_logits = None
    divides_vocabulary = False

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function

    def prepare(self, model: Any, device: torch.device) -> None:
        model.prepare_hidden_states()

    def compute(self, model: Forward, batch: Batch) -> LossOutput:
        hidden_states, _, aux_loss = model.hidden_states(batch)
        num_tokens = (model.targets(batch) != IGNORE_INDEX).sum()
        shifted = {"shift_labels": batch["shift_labels"]} if has_shifted_labels(batch) else {}
        mean = self.function(hidden_states, labels_of(batch), **shifted)
        # Without a target both the mean and what its gradient is multiplied by may be 0 / 0.
        return LossOutput(at_least_float32(mean).where(num_tokens != 0, 0) * num_tokens, num_tokens, aux_loss)


def as_loss(loss: Loss | Callable[..., Tensor]) -> Loss:
    """Return a loss as it is, a callable of (hidden_states, labels) as a :class:`CallableLoss`."""
    if not isinstance(loss, Loss) and not callable(loss):
        got = type(loss).__name__
        raise UserError(f"loss must be a lit_fused loss or a callable of (hidden_states, labels), got {got}")
    return loss if isinstance(loss, Loss) else CallableLoss(loss)
