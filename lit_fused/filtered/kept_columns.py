"""The choice of the columns of the vocabulary that backward computes, and the correction for the columns it drops.

On a trained model nearly every probability of a row is negligible. So backward computes, for a group of rows, only
the columns in which some row's probability exceeds ``eps`` (and those of the group's targets). What is left out of a
row is small in every entry but not in the sum, and dropping it biases the gradient of the hidden states. But two things
are known about the dropped block T without computing it: each row's sum m, the row's whole mass minus what was kept of
it, and each column's sum c, which forward has taken. The rank-one product that has both,

    T_iv ~ m_i q_v,        q_v = c_v / sum(c) over the dropped columns,

stands for it. It costs a vector per group, and keeps every row sum and every column sum of the logits' gradient exact.

Masses are judged by what a row's gradient is, 1 - p(target): a confident row drops little, and has little. A row whose
entries up to ``eps`` hold more than ``MAX_ROW_DROPPED`` of that, as all do early in training, is exact, alone: it is
computed in all columns, and its group is that of the others. So is a row that a z-loss has turned around (a log-sum-exp
below -1 / (2 z)), or that is not finite. A row drops at most what it has in such entries, and usually much less, since
other rows keep columns too. A group that drops more than ``MAX_DROPPED`` of its rows' 1 - p(target) drops nothing; nor
do, where more than a sixteenth of all rows would be exact alone, the groups that have most of them.

G groups, N tokens, V vocabulary, or a rank's part of it. "Gradient" means that of the logits' products, without the
incoming gradient. docs/filtered.md explains the filter.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lit_fused.ops.kernel_path import HeadCall, RowResults
from lit_fused.ops.options import TILE_ROWS, chunks

# Columns are kept for a group as one. Smaller groups keep fewer columns at the same eps and have the larger error, in
# about the same proportion; their products are small, and each gathers its own rows of the weight.
GROUP_ROWS = 2048
# The error of a gradient grows with the mass that goes through the correction: docs/evidence/filtered.md has the curve.
MAX_DROPPED = 0.1
MAX_ROW_DROPPED = 0.5

STATISTICS = ("dropped_mass", "kept_columns", "exact_tokens")


class Filter(NamedTuple):
    """The choice that forward saves for backward, and its statistics."""

    kept_GV: Tensor  # bool: columns that backward computes; an exact group has all
    tail_GV: Tensor  # q: the distribution of a group's dropped mass over columns; zero at kept ones
    # Each row's sum of the gradient over all columns: less that over the kept ones it is the dropped mass. The
    # Hopper path leaves the target's entry, which is always kept, out of both.
    mass_N: Tensor
    exact_N: Tensor  # bool: rows that are exact alone; column sums and masses do not have them
    statistics: Tensor  # (3,) sums over valid tokens: dropped over whole mass, share of kept columns, exact tokens


class ColumnSums:
    """Takes in the gradient of the logits chunk by chunk, and then chooses the columns. Kernels without this matrix in
    memory write into ``of_group``, ``mass_N`` and ``exact_N`` in place of ``add``."""

    def __init__(
        self, filter_eps: float, tokens: int, vocabulary: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.eps, count = filter_eps, len(groups(tokens))
        self.sums_GV = torch.zeros(count, vocabulary, dtype=dtype, device=device)
        self.mass_N = torch.zeros(tokens, dtype=dtype, device=device)
        self.exact_N = torch.zeros(tokens, dtype=torch.bool, device=device)
        # One column more is for the targets that have none here.
        self._largest = torch.zeros(count, vocabulary + 1, dtype=dtype, device=device)
        self.largest_GV = self._largest[:, :vocabulary]

    def of_group(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """Return sums and largest entries (V,) of the group that has the chunk's rows."""
        group = chunk.start // GROUP_ROWS
        return self.sums_GV[group], self.largest_GV[group]

    def mark_exact(self, chunk: slice, small_C: Tensor, results: RowResults, call: HeadCall) -> Tensor:
        """Find the chunk's rows that are exact alone, by their masses in entries up to eps; the same on all ranks."""
        if call.shard is not None:
            dist.all_reduce(small_C, group=call.shard.group)
        turned_C = 1 + 2 * call.options.z_loss * results.lse < 0
        self.exact_N[chunk] = ~(small_C <= MAX_ROW_DROPPED * gradient_mass(results.nll)) | turned_C
        return self.exact_N[chunk]

    def add(self, chunk: slice, gradient_CV: Tensor, columns_C: Tensor, results: RowResults, call: HeadCall) -> None:
        """Take in a chunk's gradient with respect to the products, which has the scale in it, and change it: rows that
        are exact become zero. ``columns_C`` are the targets as columns of this rank."""
        scale = call.options.scale
        sums_V, largest_V = self.of_group(chunk)
        small_C = torch.empty_like(results.nll)
        for part in chunks(len(gradient_CV), max(2**22 // max(len(sums_V), 1), 1)):
            entries = gradient_CV[part].to(sums_V.dtype) / scale
            if entries.shape[1]:
                here = (columns_C[part, None] >= 0) & (columns_C[part, None] < entries.shape[1])
                place = columns_C[part, None].where(here, 0)
                entries.scatter_(1, place, entries.gather(1, place).masked_fill_(here, 0))
            small_C[part] = entries.masked_fill_(entries > self.eps, 0).sum(1)
        gradient_CV.masked_fill_(self.mark_exact(chunk, small_C, results, call)[:, None], 0)
        sums_V.add_(gradient_CV.sum(0, dtype=sums_V.dtype).div_(scale))
        extreme_V = gradient_CV.amax(0) if scale > 0 else gradient_CV.amin(0)
        torch.maximum(largest_V, extreme_V.to(largest_V.dtype).div_(scale), out=largest_V)
        self.mass_N[chunk] = gradient_CV.sum(1, dtype=self.mass_N.dtype).div_(scale)

    def choose(self, targets_N: Tensor, columns_N: Tensor, nll_N: Tensor, call: HeadCall) -> Filter:
        """Return the filter, given targets, negative if ignored, and their columns on this rank, if in [0, V)."""
        vocabulary, group_N = self.sums_GV.shape[1], _group_of(targets_N)
        crowded_G = _crowded(self.exact_N)
        self.exact_N &= ~crowded_G[group_N]
        filtered_N = (targets_N >= 0) & ~self.exact_N
        here_N = (columns_N >= 0) & (columns_N < vocabulary) & ~self.exact_N
        place_N = group_N * (vocabulary + 1) + columns_N.where(here_N, vocabulary)
        self._largest.view(-1).index_fill_(0, place_N, math.inf)
        kept_GV = self.largest_GV > self.eps
        dropped_GV = self.sums_GV.masked_fill_(kept_GV, 0)
        total_G = dropped_GV.sum(1)

        # All ranks get the same numbers, and so decide the same.
        numbers = torch.stack([total_G, kept_GV.sum(1, dtype=total_G.dtype)])
        if call.shard is not None:
            dist.all_reduce(numbers, group=call.shard.group)
        dropped_G, columns_G = numbers
        alone_N = (targets_N >= 0) & self.exact_N
        of_rows = torch.stack([filtered_N, alone_N, gradient_mass(nll_N).masked_fill(~filtered_N, 0)])
        rows_G, alone_G, gradient_G = _by_group(of_rows.to(dropped_G.dtype)).sum(2)
        exact_G = ~(dropped_G <= MAX_DROPPED * gradient_G) | (columns_G == call.vocabulary) | crowded_G
        kept_GV |= exact_G[:, None]

        share_G = (columns_G / call.vocabulary).masked_fill_(exact_G, 1)
        part_G = dropped_G / gradient_G.clamp(min=torch.finfo(gradient_G.dtype).tiny)
        dropped_G = (rows_G * part_G).masked_fill_(exact_G, 0)
        statistics = torch.stack([dropped_G, rows_G * share_G + alone_G, rows_G * exact_G + alone_G]).sum(1)
        tail_GV = tail_distribution(dropped_GV, total_G.masked_fill_(exact_G, 0))
        return Filter(kept_GV, tail_GV, self.mass_N, self.exact_N, statistics)


def _crowded(exact_N: Tensor) -> Tensor:
    """Return the groups (G,) in which rows are not exact alone but with all others: those that have most of such rows,
    beyond the number that :func:`most_rows_alone` allows."""
    rows_G = _by_group(exact_N).sum(1)
    rank_G = rows_G * len(rows_G) + torch.arange(len(rows_G), device=rows_G.device)  # none is that of another
    return (rows_G * (rank_G <= rank_G[:, None])).sum(1) > most_rows_alone(len(exact_N))


class KeptColumns(NamedTuple):
    """The kept columns of each group, next to each other."""

    columns_GV: Tensor  # int32, in ascending order; beyond the group's count zero
    counts_G: Tensor  # int32
    target_place_N: Tensor  # int64, where each row's target is among them; as it came where it is no column here

    @classmethod
    def of(cls, kept_GV: Tensor, columns_N: Tensor) -> "KeptColumns":
        """Return the columns that are marked; ``columns_N`` are those of the rows' targets."""
        count, vocabulary = kept_GV.shape
        counts_G = kept_GV.sum(1)
        # One scan serves all groups: a scan of each is as slow as the longest.
        places_GV = kept_GV.reshape(-1).cumsum(0).view(count, vocabulary) - 1 - (counts_G.cumsum(0) - counts_G)[:, None]
        # Dropped columns go to one place more, and it is cut off.
        columns_GV = torch.zeros(count, vocabulary + 1, dtype=torch.int32, device=kept_GV.device)
        every_GV = torch.arange(vocabulary, dtype=torch.int32, device=kept_GV.device).expand(count, -1)
        columns_GV.scatter_(1, places_GV.where(kept_GV, vocabulary), every_GV)
        here_N = (columns_N >= 0) & (columns_N < vocabulary)
        if vocabulary:
            place_N = places_GV.view(-1)[_group_of(columns_N) * vocabulary + columns_N.where(here_N, 0)]
            columns_N = place_N.where(here_N, columns_N)
        return cls(columns_GV[:, :vocabulary], counts_G.int(), columns_N)


def tail_distribution(dropped_GV: Tensor, total_G: Tensor) -> Tensor:
    """Return each group's sums over the columns it drops (G, V), normalised to one; zero where their total is."""
    return (dropped_GV / total_G[:, None]).masked_fill_(total_G[:, None] == 0, 0)


def gradient_mass(nll: Tensor) -> Tensor:
    """Return 1 - p(target), which is half of the absolute sum of a row's gradient."""
    return -torch.expm1(-nll)


def groups(tokens: int) -> list[slice]:
    """Return the groups' rows."""
    return chunks(tokens, GROUP_ROWS)


def most_rows_alone(tokens: int) -> int:
    """Return how many rows may be exact alone: about a sixteenth, which with a row for each group fill whole tiles. A
    path that does not know their number provides for it."""
    return min(-(-max(tokens // 16, 1) // TILE_ROWS) * TILE_ROWS - len(groups(tokens)), tokens)


def rows_within_group(rows: int) -> int:
    """Return the largest number of rows, at most ``rows``, by which chunks divide a group."""
    return min(1 << (max(rows, 1).bit_length() - 1), GROUP_ROWS)


def _group_of(rows_N: Tensor) -> Tensor:
    return torch.arange(len(rows_N), device=rows_N.device) // GROUP_ROWS


def _by_group(numbers_N: Tensor) -> Tensor:
    """Return numbers (..., N) as (..., G, rows), with zeros behind the last group's."""
    missing = -numbers_N.shape[-1] % GROUP_ROWS
    if missing:
        numbers_N = torch.nn.functional.pad(numbers_N, (0, missing))
    return numbers_N.unflatten(-1, (-1, GROUP_ROWS))
