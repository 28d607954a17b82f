"""The standard loss, the baseline for any model: cross entropy of the model's own logits ``[batch, sequence,
vocabulary]``, which are built in the compute dtype and once more in float32."""

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lit_fused.losses.loss import WEIGHTS, Batch, Forward, Loss, LossOutput, at_least_float32
from lit_fused.ops.label_checks import IGNORE_INDEX, check_one_per_position, check_range
from lit_fused.ops.options import LossOptions


class CrossEntropyLoss(Loss):
    """Cross entropy of the model's logits.

    Args:
        label_smoothing: in [0, 1].
        z_loss: weight of the squared log-sum-exp, >= 0.
    """

    inputs = (WEIGHTS,)
    replaces_own = True
    builds_logits = True
    divides_rows = True

    def __init__(self, *, label_smoothing: float = 0.0, z_loss: float = 0.0) -> None:
        LossOptions(label_smoothing=label_smoothing, z_loss=z_loss)  # checks them
        self.label_smoothing, self.z_loss = label_smoothing, z_loss

    def compute(self, model: Forward, batch: Batch) -> LossOutput:
        logits, targets, weights, aux_loss = self._flat(model, batch)
        options: Any = {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss, "weights": weights}
        return replace(cross_entropy_of_logits(logits, targets, **options), aux_loss=aux_loss)

    def measure(self, model: Forward, batch: Batch) -> LossOutput:
        logits, targets, weights, aux_loss = self._flat(model, batch)
        output = replace(cross_entropy_of_logits(logits, targets, weights=weights), aux_loss=aux_loss)
        if self.label_smoothing or self.z_loss:
            output.stats |= self._added(at_least_float32(logits.detach()), targets, weights, output.loss_sum.detach())
        return output

    def _added(self, logits: Tensor, targets: Tensor, weights: Tensor | None, nll: Tensor) -> dict[str, Tensor]:
        """Return the sums of what is trained beside the cross entropy, whose sum is ``nll``."""
        valid, lse = targets != IGNORE_INDEX, logits.logsumexp(-1)
        factors = valid.to(lse.dtype) if weights is None else weights

        def summed(numbers: Tensor) -> Tensor:
            return (numbers * factors).where(valid, 0).sum()

        stats: dict[str, Tensor] = {}
        if self.label_smoothing:
            uniform = summed(lse - logits.mean(-1))
            stats["smoothed_loss"] = (1 - self.label_smoothing) * nll + self.label_smoothing * uniform
        if self.z_loss:
            lse_squared = summed(lse.square())
            stats |= {"z_loss": self.z_loss * lse_squared} | ({"lse_squared": lse_squared} if weights is None else {})
        return stats

    def _flat(self, model: Forward, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return logits (N, V), targets (N,), their weights (N,) and the auxiliary loss."""
        targets, weights = model.targets(batch), model.token_weights(batch)
        logits, aux_loss = model.logits(batch)
        check_one_per_position(targets, logits, "logits")
        return logits.flatten(0, -2), targets.flatten(), None if weights is None else weights.flatten(), aux_loss


def cross_entropy_of_logits(
    logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0, weights: Tensor | None = None
) -> LossOutput:
    """Return sums over logits (N, V) and int64 targets (N,), -100 where ignored; computed in at least float32. With
    weights (N,) of the targets they are weighted, and have no statistics."""
    logits = at_least_float32(logits)
    valid = check_range(targets, logits.shape[-1])
    options: Any = {"ignore_index": IGNORE_INDEX, "label_smoothing": label_smoothing}
    if weights is not None:
        losses = F.cross_entropy(logits, targets, reduction="none", **options)
        if z_loss:
            losses = losses + z_loss * logits.logsumexp(-1).square().where(valid, 0)
        return LossOutput((losses * weights).sum(), (weights * valid).sum())
    loss_sum = F.cross_entropy(logits, targets, reduction="sum", **options)
    stats = {"correct": (valid & (logits.detach().argmax(-1) == targets)).sum()}
    if z_loss:
        lse_squared = (logits.logsumexp(-1) ** 2).where(valid, 0).sum()
        stats["lse_squared"] = lse_squared.detach()
        loss_sum = loss_sum + z_loss * lse_squared
    if not label_smoothing and not z_loss:
        stats["nll"] = loss_sum.detach()
    return LossOutput(loss_sum, valid.sum(), stats=stats)


def token_losses_of_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Return negative log-likelihoods (B, T), float32, of targets (B, T) under logits (B, T, V); 0 where ignored."""
    check_one_per_position(targets, logits, "logits")
    flat = at_least_float32(logits.flatten(0, -2))
    check_range(targets, flat.shape[-1])
    return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none").view_as(targets)
