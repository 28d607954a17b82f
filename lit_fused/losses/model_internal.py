"""The loss that the model computes itself, ``model(**batch, labels=labels).loss``, as a sum and a count: a reference,
and for models whose loss is more than cross entropy."""

import torch
from torch import Tensor

from lit_fused.losses.loss import Batch, ForwardPass, Loss, LossOutput, at_least_float32
from lit_fused.losses.standard import token_losses_of_logits
from lit_fused.ops.label_checks import IGNORE_INDEX, check_one_per_position, check_range


class ModelInternalLoss(Loss):
    """The model's own loss. Refused for models whose loss pairs positions and labels otherwise than the module does."""

    @property
    def builds_logits(self) -> bool:
        return True

    def prepare(self, model: ForwardPass, device: torch.device) -> None:
        model.prepare_own_loss()

    def compute(self, model: ForwardPass, batch: Batch) -> LossOutput:
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

    def token_losses(self, model: ForwardPass, batch: Batch) -> Tensor:
        logits, _ = model.logits(batch)
        return token_losses_of_logits(logits, model.targets(batch))
