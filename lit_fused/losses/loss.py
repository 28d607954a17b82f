"""The interface of the losses: what they return, and what they may ask of a model.

A training step needs the summed negative log-likelihood and the count of target tokens. Accumulation, data parallelism,
metrics and evaluation are exact once each part returns *sums and counts*, never means. A loss strategy asks a
:class:`ForwardPass` for hidden states, logits, or the model's own loss, so that its callers need not know its kind.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_fused.errors import UserError
from lit_fused.heads import OutputHead
from lit_fused.ops.label_checks import IGNORE_INDEX, check_integers

Batch = Mapping[str, Any]
SHIFTED_OR_COUNTED = ("shift_labels", "num_items_in_batch")  # of a batch, beside "labels": for the loss alone
# Each loss beside cross entropy trains on one of these; a loss that does not would train on something else.
WEIGHTS = "token_weights"
OF_SOME_LOSSES = (WEIGHTS, "desirable", "reward", "advantages", "teacher_entries")


@dataclass
class LossOutput:
    """Sums over one batch. None of them is a mean.

    Attributes:
        loss_sum: () float32 (float64 for a float64 model), summed over the valid targets. Carries the graph, also when
            every label is ignored.
        num_tokens: () int64, the number of valid targets, or of whatever else the loss is averaged over (pairs,
            groups), or the sum of their weights; stays on the device.
        aux_loss: () an auxiliary loss such as a router's, already weighted, a mean of its own; or None.
        stats: detached sums made by the same pass, each (): "nll" (nats), "correct", "entropy" (nats), "lse_squared",
            and what :attr:`Loss.statistics` and :meth:`Loss.measure` name. One that the loss cannot give exactly is
            absent.
        num_items: what the batch wants its summed loss divided by, "num_items_in_batch"; None for ``num_tokens``.
    """

    loss_sum: Tensor
    num_tokens: Tensor
    aux_loss: Tensor | None = None
    stats: dict[str, Tensor] = field(default_factory=dict)
    num_items: Tensor | float | None = None

    @property
    def loss(self) -> Tensor:
        """Return the mean over the valid targets plus the auxiliary loss: the loss of this batch alone, without targets
        zero."""
        count = torch.as_tensor(self.num_tokens if self.num_items is None else self.num_items)
        mean = self.loss_sum / count.where(count != 0, 1)
        return mean if self.aux_loss is None else mean + self.aux_loss


class ForwardPass(Protocol):
    """A forward pass, as a loss may ask a model for it, of a batch (B, T)."""

    few_targets: bool  # most positions have no target: leave them out before the output layer's products

    def targets(self, batch: Batch) -> Tensor: ...  # (B, T) int64: what each position predicts, -100 where nothing

    def token_weights(self, batch: Batch) -> Tensor | None: ...  # (B, T): a factor on the loss of each target

    def prepare_hidden_states(self) -> OutputHead | None: ...

    # (hidden states (B, T, D), the output head, the auxiliary loss or None); no logits are built
    def hidden_states(self, batch: Batch) -> tuple[Tensor, OutputHead, Tensor | None]: ...

    def logits(self, batch: Batch) -> tuple[Tensor, Tensor | None]: ...  # (B, T, V), and the auxiliary loss or None

    def prepare_own_loss(self) -> None: ...

    # (the model's own loss (), its logits (B, T, V), the auxiliary loss that is part of it or None)
    def own_loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]: ...


class Loss(ABC):
    """A loss strategy. It owns no parameters.

    Attributes:
        statistics: names of the sums in :attr:`LossOutput.stats` that cross entropy does not have. They are logged
            divided by ``num_tokens``; "x/y" is logged as x, divided by the statistic "y" instead, which is not logged.
        inputs: names of a batch's entries, tensors (B, ...), that are for the loss and not for the backbone.
        rows_together: number of successive rows of a batch that belong together, as a pair does.
        replaces_own: whether it takes the place of the model's own loss, but for options that are asked for.
    """

    statistics: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    rows_together = 1
    replaces_own = False

    @property
    @abstractmethod
    def builds_logits(self) -> bool | None:
        """Return whether the loss builds the logits of all tokens at once; None if it cannot know."""

    @abstractmethod
    def prepare(self, model: ForwardPass, device: torch.device) -> None:
        """Refuse, once at set-up, a model or a device that the loss cannot run with."""

    def check(self, model: ForwardPass, batch: Batch) -> None:
        """Look at a first batch: raise a UserError or warn of what would be silent and wrong."""
        return

    @abstractmethod
    def compute(self, model: ForwardPass, batch: Batch) -> LossOutput:
        """Return sums over ``batch``, at ``model.targets(batch)``."""

    def measure(self, model: ForwardPass, batch: Batch) -> LossOutput:
        """Return the sums of an evaluation: those of the cross entropy alone, so that runs with different losses
        compare. What training adds to it is among the statistics as far as the same pass gives it: "z_loss", and
        "smoothed_loss", the cross entropy with smoothed labels. A loss that is no cross entropy returns what it trains
        on."""
        return self.compute(model, batch)

    @abstractmethod
    def token_losses(self, model: ForwardPass, batch: Batch) -> Tensor:
        """Return the negative log-likelihood (B, T), float32, of each target; 0 where it is ignored."""

    def check_vocabulary_parallel(self) -> None:
        """Raise a UserError if the loss cannot take an output layer that is divided over ranks."""
        return  # a loss of the model's own logits gets them whole


class CallableLoss(Loss):
    """A user's own ``f(hidden_states, labels) -> mean loss over the valid targets``, as a loss strategy.

    It has to shift the batch's labels for a causal model, whose position t predicts label t + 1. For a batch without a
    valid target it should return zero, or the mean of ``F.cross_entropy``, whose gradient is zero; neither is counted.
    For batches with "shift_labels" it takes these as a keyword of this name.
    """

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.function = function

    @property
    def builds_logits(self) -> None:
        return None

    def prepare(self, model: ForwardPass, device: torch.device) -> None:
        model.prepare_hidden_states()

    def check_vocabulary_parallel(self) -> None:
        raise UserError(
            "a loss function of one's own does not know that ranks divide the output layer; choose loss=chunked, or "
            "strategy=fsdp2"
        )

    def compute(self, model: ForwardPass, batch: Batch) -> LossOutput:
        hidden_states, _, aux_loss = model.hidden_states(batch)
        num_tokens = (model.targets(batch) != IGNORE_INDEX).sum()
        shifted = {"shift_labels": batch["shift_labels"]} if has_shifted_labels(batch) else {}
        if shifted.keys() - inspect.signature(self.function).parameters.keys():
            raise UserError(
                "a batch has shift_labels, which a loss function of (hidden_states, labels) does not know: give it a "
                "parameter shift_labels, or leave them out of the batches"
            )
        mean = self.function(hidden_states, labels_of(batch), **shifted)
        if mean.ndim:
            raise UserError(
                f"a loss function of (hidden_states, labels) must return the mean as a scalar, got shape "
                f"{tuple(mean.shape)}"
            )
        # Without a target both the mean and what its gradient is multiplied by may be 0 / 0.
        counted = at_least_float32(mean).where(num_tokens != 0, 0)
        return LossOutput(counted * num_tokens, num_tokens, aux_loss)

    def token_losses(self, model: ForwardPass, batch: Batch) -> Tensor:
        raise UserError("one's own loss function gives no loss per token; use LinearCrossEntropyLoss to score text")


def as_loss(loss: Loss | Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """Return a loss strategy as it is, a callable of (hidden_states, labels) as a :class:`CallableLoss`."""
    if isinstance(loss, Loss):
        return loss
    if callable(loss):
        return CallableLoss(loss)
    got = type(loss).__name__
    raise UserError(f"loss must be a lit_fused loss or a callable of (hidden_states, labels), got {got}")


def shift_labels(labels: Tensor) -> Tensor:
    """Return targets (B, T), int64, of labels (B, T) aligned with the inputs: position t predicts label t + 1, the last
    none."""
    return F.pad(check_integers(labels)[..., 1:], (0, 1), value=IGNORE_INDEX)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return half precision as float32, float32 and float64 as they are."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def check_batch(batch: Batch) -> None:
    if not isinstance(batch, Mapping):
        raise UserError(
            f"a batch must be a dict with 'input_ids' and 'labels', got a {type(batch).__name__}; make one in the "
            "dataset or its collate function"
        )


def has_shifted_labels(batch: Batch) -> bool:
    """Return whether a batch says itself what each position predicts: "shift_labels", integers (B, T)."""
    check_batch(batch)
    return batch.get("shift_labels") is not None


def labels_of(batch: Batch) -> Tensor:
    """Return the batch's labels (B, T), int64, or raise a UserError; its "shift_labels" if it has no others."""
    check_batch(batch)
    labels = batch.get("labels")
    labels = batch.get("shift_labels") if labels is None else labels
    if labels is None:
        raise UserError(
            f"a batch needs 'labels', integers (B, T), {IGNORE_INDEX} where ignored; "
            f"this one has {sorted(name for name, value in batch.items() if value is not None)}"
        )
    return check_integers(labels)
