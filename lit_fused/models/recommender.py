"""A sequential recommender as a language model whose vocabulary is a catalogue of items.

Items are numbered from 1 and 0 is padding, so the loss takes the table without its first row: padding is no entry of
the softmax and cannot be predicted. Entry v of the output layer is item v + 1.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_fused.errors import UserError, check_number
from lit_fused.heads import OutputHead
from lit_fused.heads.capture import extract_hidden_states
from lit_fused.losses import Loss, LossOutput
from lit_fused.losses.loss import Batch, has_shifted_labels, labels_of
from lit_fused.models.item_encoders import INITIAL_STD, MASK
from lit_fused.models.language_model import LanguageModel
from lit_fused.models.shared_table import SharedTable
from lit_fused.ops import top_items
from lit_fused.ops.label_checks import IGNORE_INDEX


class Recommendations(NamedTuple):
    items: Tensor  # (B, k) int64, the best first, 0 where fewer than k are left
    scores: Tensor  # (B, k) float32


class _ItemHead(nn.Module):
    """The rows of a model's table that are items, as an output layer. It owns no parameter."""

    def __init__(self, model: "RecommenderModel") -> None:
        super().__init__()
        self._model = (model,)  # in a tuple, as it is no submodule

    @property
    def weight(self) -> Tensor:
        model = self._model[0]
        return model.table.weight[1:] if model.shared.items is None else model.shared.items

    @property
    def bias(self) -> Tensor | None:
        return self._model[0].bias

    def forward(self, hidden_states: Tensor) -> Tensor:
        return nn.functional.linear(hidden_states, self.weight, self.bias)


class RecommenderModel(LanguageModel):
    """Predicts a user's next item, or hidden ones if the backbone is bidirectional, over the whole catalogue.

    A batch has "input_ids" and "labels", integers (B, T), aligned: items from 1 on, 0 for padding; labels of 0 and -100
    are ignored. It may have "token_weights" (B, T) as in :class:`LanguageModel`, and "seen" (B, S), items that the
    rows' rankings leave out, 0 for none. In evaluation the statistics have, of all labels, ``ndcg_at_10``,
    ``recall_at_10`` and ``mrr`` over the whole catalogue.

    Args:
        backbone: returns hidden states (B, T, D) of "input_ids", and by ``get_output_embeddings()`` the table
            (items + 1, D), whose row 0 is the padding's. One with an attribute ``is_bidirectional`` that is true gets
            masked items as -1.
        loss: a loss strategy.
        popularity_correction: tau of ``logits + tau log q`` in training, with each item's share q of the interactions
            (logit adjustment, Menon et al., 2021, arXiv 2007.07314); 0 for none.
        mask_fraction: share of the items that a bidirectional backbone does not see in training.
        top_k: K of the metrics.
    """

    def __init__(
        self,
        backbone: nn.Module,
        loss: Loss | Callable[[Tensor, Tensor], Tensor],
        *,
        popularity_correction: float = 0.0,
        mask_fraction: float = 0.2,
        top_k: int = 10,
    ) -> None:
        super().__init__(backbone, loss)
        check_number("mask_fraction", mask_fraction, "lie between 0 and 1", lambda x: 0 < x < 1)
        positive = "be a number of at least 0", lambda x: 0 <= x < math.inf
        check_number("popularity_correction", popularity_correction, *positive)
        check_number("top_k", top_k, "be a number of items of at least 1", lambda x: x > 0, whole=True)
        table: Any = backbone.get_output_embeddings()  # type: ignore[operator]
        self.register_buffer("log_popularity", None, persistent=False)
        self.popularity_correction, self.mask_fraction, self.top_k = popularity_correction, mask_fraction, top_k
        self.shown: Tensor | None = None  # (V,) bool: items that an evaluation has recommended
        self._table, self._items, self.shared = (table,), (_ItemHead(self),), SharedTable(table)
        self._seen_states: Tensor | None = None

    @property
    def table(self) -> nn.Embedding:
        return self._table[0]

    @property
    def bias(self) -> Tensor | None:
        """Return what is added to the scores in training, (V,): the correction of popularity."""
        return self.log_popularity if self.training else None

    @property
    def num_items(self) -> int:
        return self.table.num_embeddings - 1

    @property
    def vocabulary(self) -> int:
        return self.num_items

    @property
    def statistics(self) -> tuple[str, ...]:
        return (*super().statistics, *ranking_names(self.top_k))

    def grow(self, num_items: int) -> None:
        """Add rows to the table up to ``num_items`` items; those that are there stay. Raise a UserError for fewer."""
        weight, more = self.table.weight, num_items - self.num_items
        if more < 0:
            raise UserError(
                f"the model has {self.num_items} items and the data only {num_items}: they are not numbered alike; "
                "give the items of the model's run (data.items=RUN/items.parquet)"
            )
        if not more:
            return
        rows = torch.randn(more, weight.shape[1], dtype=weight.dtype, device=weight.device) * INITIAL_STD
        self.table.weight = nn.Parameter(torch.cat([weight.detach(), rows]), weight.requires_grad)
        self.table.num_embeddings = num_items + 1

    def correct_popularity(self, counts: Tensor) -> None:
        """Take the interactions (V,) of each item for the correction; an item without any counts as the least popular
        of the others."""
        if self.popularity_correction:
            counts = counts.double().clamp(min=float(counts[counts > 0].min()))
            log_q = self.popularity_correction * (counts / counts.sum()).log()
            self.log_popularity = log_q.to(self.table.weight)

    def prepare_hidden_states(self) -> OutputHead:
        if self._head is None or self._head.layer is not self._items[0]:
            self.replace_head(OutputHead(self._items[0]))
        assert self._head is not None
        return self._head

    def targets(self, batch: Batch) -> Tensor:
        """Return the entry of the output layer that each position predicts, (B, T) int64, -100 where none."""
        items = labels_of(batch) if has_shifted_labels(batch) else super().targets(batch)
        return (items - 1).where(items > 0, IGNORE_INDEX)

    def forward(self, batch: Batch) -> LossOutput:
        batch = self._masked(batch)
        self._seen_states = None
        with self.shared:
            output = super().forward(batch)
        states, self._seen_states = self._seen_states, None
        if not torch.is_grad_enabled() and states is not None:
            output.stats |= self._ranking(states, batch)
        return output

    def token_losses(self, batch: Batch) -> Tensor:
        return super().token_losses(self._masked(batch))

    def spot_check(self, batch: Batch) -> set[str]:
        with self.spared_random_numbers():
            return super().spot_check(self._masked(batch))

    @torch.no_grad()
    def recommend(
        self, input_ids: Any, k: int = 10, seen: Any = None, logits_budget_mib: float | None = None
    ) -> Recommendations:
        """Return the k best next items of histories: integers (B, T), padded with 0 on either side, or B sequences.

        ``seen`` are items that a row must not get: integers (B, S), 0 for none, or B sequences; None: those of
        ``input_ids``. A history without items gets a recommendation as well, that of the padding alone.
        """
        input_ids = padded_histories(input_ids)
        seen = input_ids if seen is None else seen
        if not isinstance(seen, Tensor):
            seen = [torch.as_tensor(row, dtype=torch.int64) - 1 for row in seen]
        if getattr(self.backbone, "is_bidirectional", False):
            most = getattr(self.backbone, "max_length", input_ids.shape[1] + 1)
            rows = [[*row[row > 0][1 - most :].tolist(), MASK] for row in input_ids]
            input_ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True).to(input_ids)
        states = self.returned_hidden_states({"input_ids": input_ids})
        columns = torch.arange(input_ids.shape[1], device=input_ids.device)
        last = columns.where(input_ids != 0, 0).amax(1)
        states = states[torch.arange(len(states), device=states.device), last]
        found = self._top(states, k, seen - 1 if isinstance(seen, Tensor) else seen, None, logits_budget_mib)
        return Recommendations(found.items + 1, found.scores)

    def _top(self, states: Tensor, k: int, exclude: Any, targets: Tensor | None, budget: float | None = None) -> Any:
        states, weight, bias = self.prepare_hidden_states().operands(states)
        return top_items(states, weight, min(k, self.num_items), exclude, bias, targets, logits_budget_mib=budget)

    def _masked(self, batch: Batch) -> Batch:
        """Return what a bidirectional backbone gets: some items masked, in evaluation those that have a label."""
        if not getattr(self.backbone, "is_bidirectional", False) or has_shifted_labels(batch):
            return batch
        ids, labels = batch["input_ids"], labels_of(batch)
        hidden = labels > 0
        if self.training:
            drawn = torch.rand(ids.shape, dtype=torch.float32, device=ids.device)
            # At least one item of each row is masked: the one with the least number.
            least = drawn.masked_fill(~hidden, 2.0).amin(1, keepdim=True)
            hidden = hidden & ((drawn < self.mask_fraction) | (drawn == least))
        others = {name: value for name, value in batch.items() if name != "labels"}
        return others | {
            "input_ids": ids.masked_fill(hidden, MASK),
            "shift_labels": labels.masked_fill(~hidden, IGNORE_INDEX),
        }

    def inputs_of(self, batch: Batch) -> dict[str, Any]:
        return {name: value for name, value in super().inputs_of(batch).items() if name != "seen"}

    def returned_hidden_states(self, batch: Batch) -> Tensor:
        self._seen_states = extract_hidden_states(self.run_backbone(self.inputs_of(batch)), self.name)
        return self._seen_states

    def _ranking(self, states: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the summed metrics of all positions with a target, and note which items were recommended."""
        targets, weights = self.targets(batch), self.token_weights(batch)
        rows, positions = (targets >= 0).nonzero(as_tuple=True)
        seen = batch.get("seen")
        found = self._top(
            states[rows, positions], self.top_k, None if seen is None else seen[rows] - 1, targets[rows, positions]
        )
        if self.shown is not None:
            self.shown[found.items[found.items >= 0]] = True
        places = found.ranks.double() + 1
        factors = torch.ones_like(places) if weights is None else weights[rows, positions].double()
        hits = factors * (places <= min(self.top_k, self.num_items))  # What is left out is behind all items.
        sums = (hits / (places + 1).log2()).sum(), hits.sum(), (factors / places).sum()
        return dict(zip(ranking_names(self.top_k), sums, strict=True))


def padded_histories(histories: Any) -> Tensor:
    """Return histories, a tensor (B, T) or B sequences of numbers of items, as int64 (B, T), T >= 1, padded with 0."""
    if not isinstance(histories, Tensor):
        rows = [torch.as_tensor(row, dtype=torch.int64) for row in histories]
        histories = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return histories if histories.shape[1] else histories.new_zeros(len(histories), 1)


def ranking_names(k: int) -> tuple[str, str, str]:
    """Return the names of the sums: of 1 / log2(1 + place) and of 1 for targets among the k best, and of 1 / place."""
    return f"ndcg_at_{k}", f"recall_at_{k}", "mrr"
