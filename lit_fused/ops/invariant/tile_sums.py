"""Sums of each row over fixed tiles of the vocabulary, and the tiles that a rank computes where it is divided.

Tiles begin at multiples of their width in the *whole* vocabulary, wherever a rank's part begins. A tile that is cut by
a boundary of parts is computed by the rank with its first entry: the others give it their few rows of the weight. So
each tile is computed once, of the same numbers by the same kernel, on any number of ranks, which exchange tiles' sums.

C rows of a chunk, D hidden, R ranks, T tiles, V vocabulary, W entries of a tile.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..vocabulary_parallel import VocabularyShard


class TileSums(NamedTuple):
    """Sums over each tile's logits x of a row, without the target's. Kernels choose the unit of logits."""

    maxima_TC: Tensor  # of x
    totals_TC: Tensor  # of exp(x - maximum)
    dots_TC: Tensor  # of exp(x - maximum) (x - maximum)
    places_TC: Tensor  # int32, the entry of the maximum, the first of equal ones
    targets_C: Tensor  # the target's logit

    @classmethod
    def zeros(cls, tiles: int, rows: int, dtype: torch.dtype, device: torch.device) -> "TileSums":
        numbers = torch.zeros(3 * tiles + 1, rows, dtype=dtype, device=device)
        places_TC = torch.zeros(tiles, rows, dtype=torch.int32, device=device)
        maxima_TC, totals_TC, dots_TC = numbers[:-1].view(3, tiles, rows)
        return cls(maxima_TC, totals_TC, dots_TC, places_TC, numbers[-1])

    def of(self, tiles: slice) -> "TileSums":
        """Return views of some tiles, and all targets."""
        maxima_TC, totals_TC, dots_TC, places_TC, targets_C = self
        return TileSums(maxima_TC[tiles], totals_TC[tiles], dots_TC[tiles], places_TC[tiles], targets_C)

    def exchange(self, group: dist.ProcessGroup) -> None:
        """Give every rank the sums of all tiles. One rank alone has other numbers than zero: no sum is rounded."""
        for numbers in self:
            dist.all_reduce(numbers, group=group)


class Part(NamedTuple):
    """Successive tiles that this rank computes: which ones, and their rows of the weight and entries of the bias."""

    tiles: slice
    weight_VD: Tensor
    bias_V: Tensor | None


def parts_of(weight_VD: Tensor, bias_V: Tensor | None, shard: VocabularyShard | None, width: int) -> list[Part]:
    """Return what this rank computes of the tiles of ``width`` entries, so that all tiles have one rank."""
    if shard is None:
        return [Part(slice(0, -(-len(weight_VD) // width)), weight_VD, bias_V)]
    start, end = shard.start, shard.start + len(weight_VD)
    first, last = -(-start // width), (-(-end // width) if end == shard.vocabulary else end // width)
    whole = slice(first * width - start, min(last * width, end) - start)
    cut = end // width if last * width < end and end // width >= first else None
    weight_WD = _whole_tile(weight_VD, start, cut, width, shard.group)
    bias_W = None if bias_V is None else _whole_tile(bias_V, start, cut, width, shard.group)
    found = []
    if first < last:
        found.append(Part(slice(first, last), weight_VD[whole], None if bias_V is None else bias_V[whole]))
    if cut is not None:
        rows = slice(min(width, shard.vocabulary - cut * width))
        found.append(Part(slice(cut, cut + 1), weight_WD[rows], None if bias_W is None else bias_W[rows]))
    return found


def _whole_tile(rows_V: Tensor, start: int, cut: int | None, width: int, group: dist.ProcessGroup) -> Tensor:
    """Return all ranks' rows (W, ...) of tile ``cut``; each rank gives its own of the tile that began before it."""
    given, within = rows_V.new_zeros(width, *rows_V.shape[1:]), start % width
    of_tile = torch.full((1,), -1, device=rows_V.device)
    if within and len(rows_V):
        here = rows_V[: width - within]
        given[within : within + len(here)] = here
        of_tile.fill_(start // width)
    ranks = dist.get_world_size(group)
    all_given, of_tiles = given.new_empty(ranks, *given.shape), of_tile.new_empty(ranks, 1)
    dist.all_gather([*all_given.view(torch.uint8)], given.view(torch.uint8), group=group)
    dist.all_gather([*of_tiles], of_tile, group=group)
    if cut is None:
        return given
    own = rows_V[cut * width - start :]
    of_cut = (of_tiles == cut).view(ranks, *[1] * rows_V.ndim)
    tile_W = all_given.where(of_cut, 0).sum(0, dtype=rows_V.dtype)  # of each row, one rank has other numbers than zero
    tile_W[: len(own)] = own
    return tile_W
