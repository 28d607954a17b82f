"""The best entries of a catalogue and the rank of a target in it, one chunk of rows at a time.

Scores are compared whole rows at a time: a row's best entries, the score of its target and the entries ahead of it come
from the same products, so that ranks are exact whatever these were rounded to. Equal scores are ordered by their entry,
the lower one first, on every device.

N rows (users), C chunk, D hidden, V entries (items), or a rank's part of them.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .kernel_path import HeadCall
from .label_checks import IGNORE_INDEX, check_inputs
from .operators import one_graph_break
from .options import LossOptions, budget_mib, chunk_rows, chunks
from .products import Products
from .user_error import UserError, check_number
from .vocabulary_parallel import VocabularyShard

Ragged = Tensor | Sequence[Any]
NO_ITEM = -1  # an entry that does not exist
_BYTES_PER_SCORE = 4 + 2  # float32, and what is compared of it


class TopItems(NamedTuple):
    """The best entries of each row, and how many are better than its target."""

    items: Tensor  # (..., k) int64, the best first; -1 where fewer than k are left
    scores: Tensor  # (..., k) float32 (float64 for float64 hidden states); -inf where there is no item
    ranks: Tensor | None  # (...) int64, 0 for the best; V where the target is excluded, -1 where there is no target


class _Excluded:
    """Entries that each row excludes, as pairs of row and entry that are sorted by row."""

    def __init__(self, exclude: Ragged | None, rows: int, entries: int, device: torch.device) -> None:
        self.rows = self.entries = torch.zeros(0, dtype=torch.int64, device=device)
        if exclude is None:
            return
        if len(exclude) != rows:
            raise UserError(f"exclude has items for {len(exclude)} rows, but there are {rows} hidden states")
        if isinstance(exclude, Tensor) and exclude.ndim == 2:
            counts, flat = torch.full((rows,), exclude.shape[1], device=device), exclude.reshape(-1).to(device)
        else:
            parts = [torch.as_tensor(row).reshape(-1) for row in exclude]
            counts = torch.tensor([len(part) for part in parts], dtype=torch.int64, device=device)
            flat = torch.cat([part for part in parts if len(part)] or [self.entries]).to(device)
        flat = _integers("exclude", flat)
        _check_items("exclude", flat, entries)
        named = flat >= 0
        self.rows = torch.arange(rows, device=device).repeat_interleave(counts)[named]
        self.entries = flat[named]

    def of(self, chunk: slice, shard: VocabularyShard | None, columns: int) -> tuple[Tensor, Tensor]:
        """Return rows of a chunk and the columns that they exclude, of those that this rank has."""
        ends = torch.tensor([chunk.start, chunk.stop], device=self.rows.device)
        first, last = torch.searchsorted(self.rows, ends).tolist()
        rows, entries = self.rows[first:last] - chunk.start, self.entries[first:last]
        if shard is None:
            return rows, entries
        entries = entries - shard.start
        here = (entries >= 0) & (entries < columns)
        return rows[here], entries[here]


def _integers(name: str, items: Tensor) -> Tensor:
    """Return items as int64: in 8 bits -100 would be 156."""
    if items.is_floating_point() or items.is_complex() or items.dtype == torch.bool:
        raise UserError(f"{name} must name items by integers, got {items.dtype}")
    return items.long()


def _check_items(name: str, items: Tensor, catalogue: int) -> None:
    if items.numel() and bool(((items < NO_ITEM) | (items >= catalogue)).any()):
        raise UserError(
            f"{name} must be items from 0 to {catalogue - 1}, or -1 for none, got values from {items.min().item()} to "
            f"{items.max().item()}; items that came after training need rows in the table first"
        )


@one_graph_break
@torch.no_grad()
def top_items(
    hidden_states: Tensor,
    weight: Tensor,
    k: int,
    exclude: Ragged | None = None,
    bias: Tensor | None = None,
    targets: Tensor | None = None,
    *,
    scale: float = 1.0,
    padding_item: int | None = None,
    logits_budget_mib: float | None = None,
    shard: VocabularyShard | None = None,
) -> TopItems:
    """Return the k best items of each row, and the rank of its target, over the whole catalogue and exactly.

    The score of an item is ``scale * hidden_states @ weight.T + bias``. Only a chunk of rows has its scores in memory.
    Nothing has a gradient.

    Args:
        hidden_states: (..., D) floating point.
        weight: (V, D), the table of the items.
        k: number of items, from 1 to V.
        exclude: items that a row must not get: integers (N, S), -1 for none, or a sequence of N sequences of them, for
            N rows in the order of the hidden states'.
        bias: (V,) added to the scores.
        targets: (...) integers, an item whose rank is wanted, or -1 (or -100) for none.
        padding_item: an item that no row gets and no rank counts.
        logits_budget_mib: size of a chunk of scores in MiB; None is that of the losses.
        shard: this rank's part of the items; every rank of its group calls with the same rows and gets all results.

    Raises:
        UserError: shapes, dtypes, k or items that do not fit, or scores that are no numbers.
    """
    LossOptions(scale=scale, logits_budget_mib=logits_budget_mib)  # checks them
    items = len(weight) if shard is None else shard.vocabulary
    if type(k) is not int or not 1 <= k <= items:
        raise UserError(f"k must be a number of items from 1 to the catalogue's {items}, got {k!r}")
    if padding_item is not None:
        check_number("padding_item", padding_item, "be an item", lambda x: 0 <= x < items, whole=True)
    shape = hidden_states.shape[:-1]
    asked = (
        torch.full(shape, NO_ITEM, device=hidden_states.device) if targets is None else _integers("targets", targets)
    )
    asked = asked.masked_fill(asked == IGNORE_INDEX, NO_ITEM)
    _check_items("targets", asked, items)
    if shard is not None:
        shard.refuse_own_tokens("top_items")
        shard.check(weight)
    check_inputs(hidden_states, weight, asked, bias, NO_ITEM, items)
    targets_N, hidden_ND = asked.reshape(-1), hidden_states.reshape(-1, hidden_states.shape[-1])
    excluded = _Excluded(exclude, len(hidden_ND), items, hidden_ND.device)
    catalogue = _Catalogue(weight, bias, scale, shard)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for chunk, scores_CV in catalogue.scores(hidden_ND, logits_budget_mib):
        targets_C = ranks_C = targets_N[chunk]
        target_scores_C = catalogue.scores_of(scores_CV, targets_C)
        scores_CV[excluded.of(chunk, shard, len(weight))] = -torch.inf
        if padding_item is not None:
            scores_CV[:, catalogue.entries_V == padding_item] = -torch.inf
        if targets is not None:
            ranks_C = catalogue.ranks(scores_CV, targets_C, target_scores_C)
        found.append((*catalogue.best(scores_CV, k), ranks_C))
    best, scores, ranks = (torch.cat(parts) for parts in zip(*found, strict=True))
    return TopItems(best.view(*shape, k), scores.view(*shape, k), None if targets is None else ranks.view(shape))


class _Catalogue:
    """The items, or this rank's part of them."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scale: float, shard: VocabularyShard | None) -> None:
        self.weight, self.bias, self.scale, self.shard = weight, bias, scale, shard
        self.start = 0 if shard is None else shard.start
        self.items = len(weight) if shard is None else shard.vocabulary
        self.entries_V = torch.arange(self.start, self.start + len(weight), device=weight.device)

    def scores(self, hidden_ND: Tensor, logits_budget_mib: float | None) -> Iterator[tuple[slice, Tensor]]:
        """Yield chunks of rows, at least an empty one, and their scores (C, V)."""
        dtype = HeadCall.here(LossOptions(), hidden_ND, self.weight, None).compute_dtype
        result = torch.promote_types(dtype, torch.float32)
        weight_DV = self.weight.to(dtype).T
        budget = logits_budget_mib or budget_mib(hidden_ND.device, self.shard)
        columns = len(self.weight) if self.shard is None else self.shard.largest
        rows = chunk_rows(len(hidden_ND), _BYTES_PER_SCORE * columns, budget, tile=1, least=1, parts=1)
        # (C, V), which the next chunk overwrites.
        buffer = torch.empty(min(rows, len(hidden_ND)), len(self.weight), dtype=result, device=hidden_ND.device)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for chunk in chunks(len(hidden_ND), rows) or [slice(0, 0)]:
                scores_CV = buffer[: chunk.stop - chunk.start]
                Products().multiply(hidden_ND[chunk].to(dtype), weight_DV, scores_CV)
                if self.scale != 1.0:
                    scores_CV *= self.scale
                if self.bias is not None:
                    scores_CV += self.bias
                yield chunk, scores_CV

    def scores_of(self, scores_CV: Tensor, targets_C: Tensor) -> Tensor:
        """Return the score (C,) of each row's target, whichever rank has it; -inf where there is none."""
        columns_C = targets_C - self.start
        here_C = (targets_C >= 0) & (columns_C >= 0) & (columns_C < scores_CV.shape[1])
        found_C = scores_CV.new_full(targets_C.shape, -torch.inf)
        if scores_CV.shape[1]:
            found_C = scores_CV.gather(1, columns_C.where(here_C, 0)[:, None])[:, 0].where(here_C, found_C)
        if self.shard is not None:
            dist.all_reduce(found_C, dist.ReduceOp.MAX, self.shard.group)
        return found_C

    def ranks(self, scores_CV: Tensor, targets_C: Tensor, target_scores_C: Tensor) -> Tensor:
        """Return how many items (C,) are ahead of each row's target, whose score is given, in the scores of those
        that are not excluded."""
        is_gone_C = self.scores_of(scores_CV, targets_C) == -torch.inf
        level_C1 = target_scores_C[:, None]
        before_CV = scores_CV == level_C1  # equal ones, of which those with a lower entry are ahead
        before_CV &= self.entries_V < targets_C[:, None]
        before_CV |= scores_CV > level_C1
        ranks_C = before_CV.sum(1)
        if self.shard is not None:
            dist.all_reduce(ranks_C, group=self.shard.group)
        return ranks_C.masked_fill(is_gone_C, self.items).where(targets_C >= 0, NO_ITEM)

    def best(self, scores_CV: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k best items of each row and their scores, (C, k), those of all ranks."""
        rows, own = len(scores_CV), min(k, scores_CV.shape[1])
        items_Ck = torch.full((rows, k), NO_ITEM, device=scores_CV.device)
        best_Ck = scores_CV.new_full((rows, k), -torch.inf)
        if own:
            values, columns = scores_CV.topk(own)
            self._settle_ties(scores_CV, values, columns)
            columns, by_column = columns.sort(1)
            values, by_value = values.gather(1, by_column).sort(dim=1, descending=True, stable=True)
            exists = values > -torch.inf
            items_Ck[:, :own] = (columns.gather(1, by_value) + self.start).where(exists, NO_ITEM)
            best_Ck[:, :own] = values
        if self.shard is not None:
            best_Ck, items_Ck = self._of_ranks(best_Ck, items_Ck)
        if bool((best_Ck[:, 0].isnan() | best_Ck[:, 0].isposinf()).any()):  # NaN is the largest of its row.
            raise UserError(
                "some scores of items are not finite, so nothing can be ranked: the table of items or the hidden "
                "states are not finite; use an earlier checkpoint, or a smaller learning rate"
            )
        return items_Ck, best_Ck

    def _of_ranks(self, best_Ck: Tensor, items_Ck: Tensor) -> tuple[Tensor, Tensor]:
        assert self.shard is not None
        ranks = range(dist.get_world_size(self.shard.group))
        of_ranks = [torch.empty_like(best_Ck) for _ in ranks], [torch.empty_like(items_Ck) for _ in ranks]
        for gathered, own in zip(of_ranks, (best_Ck, items_Ck), strict=True):
            dist.all_gather(gathered, own, group=self.shard.group)
        # A lower rank has lower entries, so that a stable order keeps equal scores in the order of their entries.
        values, order = torch.cat(of_ranks[0], 1).sort(dim=1, descending=True, stable=True)
        k = best_Ck.shape[1]
        return values[:, :k].contiguous(), torch.cat(of_ranks[1], 1).gather(1, order[:, :k])

    def _settle_ties(self, scores_CV: Tensor, values_Ck: Tensor, columns_Ck: Tensor) -> None:
        """Choose the lowest columns where more of them have the last of the k best scores than there is room for."""
        last_C1 = values_Ck[:, -1:]
        room_C = (values_Ck == last_C1).sum(1)
        crowded_C = ((scores_CV == last_C1).sum(1) > room_C) & (last_C1[:, 0] > -torch.inf)
        for row in crowded_C.nonzero()[:, 0].tolist():
            equal = (scores_CV[row] == last_C1[row]).nonzero()[:, 0]
            columns_Ck[row, values_Ck[row] == last_C1[row]] = equal[: int(room_C[row])]
