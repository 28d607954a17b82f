"""Numbers of each row and tile that the kernels of ``hopper_path`` write and read.

C chunk, D hidden, F frequent targets, N tokens, T tiles, V vocabulary. Logits are in units of log 2.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..logits.rows_of_ranks import top1_of_ranks
from ..vocabulary_parallel import VocabularyShard

TILE_COLUMNS = 256
GROUP_TILES = 1024  # that are joined first, so that a row of many is not walked by one program
FREQUENT_ROWS = 256  # of dW in float32: 64 leave 10 % more error, 1024 take away 3 %

PART_ROWS = 64  # of hidden states, which a program of ``narrow_path`` multiplies by its part of the vocabulary
# A tile in which a logit exceeds the row's shift by more than this many powers of two takes a shift of its own. A row's
# sum then stays below 2^(40 + 20) for any vocabulary below 2^20, far from float32's 2^127 even after a product.
MAX_EXCESS = 40.0


def tiles_of(vocabulary: int) -> int:
    return -(-vocabulary // TILE_COLUMNS)


def empty_float32(*size: int, like: Tensor) -> Tensor:
    """Return an uninitialised tensor, float32 whatever torch's default is: under bf16-true it is bfloat16."""
    return torch.empty(*size, dtype=torch.float32, device=like.device)


class RowFactors(NamedTuple):
    """Factors of each row, (N,) float32, applied after its numerators are stored: zero for ignored rows."""

    row_N: Tensor  # r: of the numerators
    target_N: Tensor  # t: of the target's own term, 1 - p and what else depends on it

    @classmethod
    def empty(cls, hidden_ND: Tensor) -> "RowFactors":
        return cls(*(empty_float32(len(hidden_ND), like=hidden_ND) for _ in range(2)))

    def of(self, rows: slice) -> "RowFactors":
        """Return views of some rows."""
        return RowFactors(self.row_N[rows], self.target_N[rows])


class PartialSums(NamedTuple):
    """Sums over each tile's part of a row, without the target's entry; and the final shift of each row. float32."""

    maxima_TC: Tensor  # of the logits
    sums_TC: Tensor  # of the numerators
    dots_TC: Tensor | None  # of numerators * (logits - the tile's shift), for the entropy
    shifts_C: Tensor
    places_TC: Tensor | None = None  # int32, the first column of the maximum

    @classmethod
    def empty(cls, tiles: int, rows: int, like: Tensor, *, dots: bool = True, places: bool = False) -> "PartialSums":
        maxima_TC, sums_TC = (empty_float32(tiles, rows, like=like) for _ in range(2))
        dots_TC = empty_float32(tiles, rows, like=like) if dots else None
        places_TC = torch.empty(tiles, rows, dtype=torch.int32, device=like.device) if places else None
        return cls(maxima_TC, sums_TC, dots_TC, empty_float32(rows, like=like), places_TC)

    def in_groups(self) -> "PartialSums":
        """Return uninitialised sums of groups of tiles, with the same final shifts."""
        (tiles, rows), dots = self.sums_TC.shape, self.dots_TC is not None
        groups = PartialSums.empty(-(-tiles // GROUP_TILES), rows, self.sums_TC, dots=dots)
        return groups._replace(shifts_C=self.shifts_C)

    def of(self, rows: int) -> "PartialSums":
        """Return the same memory for a chunk of fewer rows."""
        maxima_TC, sums_TC, dots_TC, shifts_C, places_TC = self
        of_rows = [None if part is None else first_rows(part, rows) for part in (dots_TC, places_TC)]
        return PartialSums(
            first_rows(maxima_TC, rows), first_rows(sums_TC, rows), of_rows[0], shifts_C[:rows], of_rows[1]
        )

    def top1(self, targets_C: Tensor, target_logits_C: Tensor, shard: VocabularyShard | None) -> Tensor:
        """Return the entry of each row's largest logit, -1 where the target is negative."""
        assert self.places_TC is not None
        maximum_C, tile_C = self.maxima_TC.max(0)
        entry_C = self.places_TC.gather(0, tile_C[None])[0].long()
        if shard is not None:
            maximum_RC = maximum_C.new_empty(dist.get_world_size(shard.group), len(maximum_C))
            dist.all_gather(list(maximum_RC), maximum_C, group=shard.group)
            entry_C, maximum_C = top1_of_ranks(entry_C, maximum_RC, shard), maximum_RC.amax(0)
        return torch.where(target_logits_C >= maximum_C, targets_C, entry_C).where(targets_C >= 0, -1)

    def written(self, statistics: bool) -> tuple[Tensor | None, ...]:
        """Return what the product's kernel writes."""
        return self.maxima_TC, self.sums_TC, self.dots_TC if statistics else None


def first_rows(sums_TC: Tensor, rows: int) -> Tensor:
    """Return (T, rows) in the memory of (T, C): next to each other, as the kernels write them."""
    return sums_TC.view(-1)[: len(sums_TC) * rows].view(len(sums_TC), rows)


class ExactRows(NamedTuple):
    """Rows of a weight's gradient, each a target's, that are summed in float32 until ``subtract_targets`` writes them.

    Such a row is the difference of two large sums, of probabilities and of targets, that nearly cancel on a trained
    model: rounding the first before the second is subtracted is most of the error of a bfloat16 dW. They cost about 1 %
    of the time, and 2 to 4 % at a small vocabulary.
    """

    rows_F: Tensor  # int64, which rows of the gradient; beyond the targets any others
    slots_V: Tensor  # int32, the place of each target's row among them, or -1
    sums_FD: Tensor

    @classmethod
    def most_frequent(cls, targets_N: Tensor, weight_VD: Tensor) -> "ExactRows":
        """Return uninitialised sums of the rows whose entries are the most frequent targets."""
        vocabulary, hidden_size = weight_VD.shape
        counts_V = torch.zeros(vocabulary, dtype=torch.int32, device=targets_N.device)
        counts_V.scatter_add_(0, targets_N.clamp(min=0).long(), (targets_N >= 0).int())
        counts_F, rows_F = counts_V.topk(min(FREQUENT_ROWS, vocabulary))
        # A row without a target gets no slot: only the rows of targets are written back.
        slots_F = torch.arange(len(rows_F), dtype=torch.int32, device=targets_N.device).where(counts_F > 0, -1)
        slots_V = torch.full_like(counts_V, -1).scatter_(0, rows_F, slots_F)
        return cls(rows_F, slots_V, empty_float32(len(rows_F), hidden_size, like=targets_N))
