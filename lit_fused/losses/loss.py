"""The three protocols of a loss without logits: the output layer, a forward pass that ends before it, and the loss.

A training step needs the summed negative log-likelihood and the count of target tokens. Accumulation, data parallelism,
metrics and evaluation are exact once each part returns *sums and counts*, never means.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_fused.errors import UserError
from lit_fused.ops.label_checks import IGNORE_INDEX, check_integers
from lit_fused.ops.vocabulary_parallel import VocabularyShard

Batch = Mapping[str, Any]
SHIFTED_OR_COUNTED = ("shift_labels", "num_items_in_batch")  # of a batch, beside "labels": for the loss alone
WEIGHTS = "token_weights"
PREVIOUS = "previous_hidden_states"  # (B, T, D) of a drafter's target, at the token before


class Head(Protocol):
    """An output layer: ``logits = softcap(scale * (h W^T) + b)``."""

    @property
    def scale(self) -> float: ...
    @property
    def softcap(self) -> float | None: ...
    @property
    def vocabulary(self) -> int: ...  # V, the number of logits per token
    @property
    def shard(self) -> VocabularyShard | None: ...  # this rank's entries, if ranks divide the vocabulary
    # h (..., D), W (V, D), b; in parts, W may be one of ``ops.frozen_columns``.
    def operands(self, hidden_states: Tensor, in_parts: bool = False) -> tuple[Tensor, Tensor, Tensor | None]: ...
    def logits(self, hidden_states: Tensor) -> Tensor: ...  # (..., V)


class Forward(Protocol):
    """A forward pass of a batch (B, T). A loss asks for what it needs of it, before or instead of logits."""

    few_targets: bool  # most positions have no target: leave them out before the output layer's products

    def targets(self, batch: Batch) -> Tensor: ...  # (B, T) int64: what each position predicts, -100 where nothing
    def token_weights(self, batch: Batch) -> Tensor | None: ...  # (B, T): a factor on the loss of each target
    def hidden_states(self, batch: Batch) -> tuple[Tensor, Head, Tensor | None]: ...  # (B, T, D), auxiliary loss
    def logits(self, batch: Batch) -> tuple[Tensor, Tensor | None]: ...  # (B, T, V), and the auxiliary loss or None

    # Each of these has t of a row's T positions where ranks divide rows, else all of them.
    def whole_rows(self, numbers: Tensor, batch: Batch) -> Tensor: ...  # (B, T, ...) of (B, t, ...), with gradients
    def own_positions(self, numbers: Tensor) -> Tensor: ...  # (B, t, ...) of (B, T, ...)


class Loss:
    """A loss of a forward pass. It owns no parameters. A subclass writes :meth:`compute`, and what else differs.

    ``prepare`` refuses, once at set-up, a LanguageModel or a device that the loss cannot run with; ``check`` looks at a
    first batch, and raises a UserError or warns of what would be silent and wrong. ``compute`` returns sums over a
    batch at ``model.targets(batch)``. ``measure`` returns those of an evaluation: of the cross entropy alone, so that
    runs with different losses compare; what training adds is among the statistics, "z_loss" and "smoothed_loss", as
    far as the same pass gives it. A loss that is no cross entropy returns what it trains on.
    """

    inputs: tuple[str, ...] = ()  # entries of a batch, tensors (B, ...), for the loss and not for the backbone
    # Sums that cross entropy does not have, logged divided by ``num_tokens``; "x/y" as x, divided by the sum "y".
    statistics: tuple[str, ...] = ()
    rows_together = 1  # successive rows of a batch that belong together, as a pair does
    replaces_own = False  # it takes the place of the model's own loss, but for options that are asked for
    builds_logits: bool | None = False  # of all tokens at once; None if it cannot know
    divides_rows = False  # sums over parts of each row add up to those of whole rows
    divides_vocabulary = True  # it can take an output layer that is divided over ranks

    def prepare(self, model: Any, device: torch.device) -> None: ...
    def check(self, model: Forward, batch: Batch) -> None: ...
    def compute(self, model: Forward, batch: Batch) -> "LossOutput":
        raise NotImplementedError

    def measure(self, model: Forward, batch: Batch) -> "LossOutput":
        return self.compute(model, batch)


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
        mean = self.loss_sum / count.masked_fill(count == 0, 1)
        return mean if self.aux_loss is None else mean + self.aux_loss


def shift_labels(labels: Tensor) -> Tensor:
    """Return targets (B, T), int64, of labels (B, T) aligned with the inputs: position t predicts label t + 1, the last
    none."""
    return F.pad(check_integers(labels)[..., 1:], (0, 1), value=IGNORE_INDEX)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return half precision as float32, float32 and float64 as they are."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def has_shifted_labels(batch: Batch) -> bool:
    """Return whether a batch says itself what each position predicts: "shift_labels", integers (B, T)."""
    return batch.get("shift_labels") is not None


def names_of(batch: Batch) -> frozenset[str]:
    """Return the names of a batch's entries that are not None."""
    return frozenset(name for name, value in batch.items() if value is not None)


def labels_of(batch: Batch) -> Tensor:
    """Return the batch's labels (B, T), int64, or raise a UserError; its "shift_labels" if it has no others."""
    if not isinstance(batch, Mapping):
        raise UserError(
            f"a batch must be a dict with 'input_ids' and 'labels', got a {type(batch).__name__}; make one in the "
            "dataset or its collate function"
        )
    labels = batch.get("labels")
    labels = batch.get("shift_labels") if labels is None else labels
    if labels is None:
        raise UserError(
            f"a batch needs 'labels', integers (B, T), {IGNORE_INDEX} where ignored; "
            f"this one has {sorted(name for name, value in batch.items() if value is not None)}"
        )
    return check_integers(labels)
