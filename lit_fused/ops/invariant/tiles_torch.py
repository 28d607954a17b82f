"""The tiles of ``invariant_path`` in PyTorch, for a CPU.

A BLAS takes other kernels for few rows, and divides long sums among threads: products are of 64 rows, padded, of 512
entries and of at most 256 of the hidden size. Half precision is computed in float32, as its products on a CPU would be
rounded.

C rows of a chunk, D hidden, M rows and W entries of a tile, T tiles, V vocabulary.
"""

import torch
from torch import Tensor

from ..kernel_path import Inputs, RowResults
from ..logits.rows_of_ranks import LOWEST
from ..logits.rows_torch import CONFIDENT, logits_of_products
from ..options import LossOptions, chunks
from .tile_sums import Part, TileSums

ROWS, WIDTH, DEPTH = 64, 512, 256


class TorchTiles:
    """Computes tiles on a CPU."""

    handles_ignored = False
    width = WIDTH

    def aligned(self, matrix: Tensor) -> Tensor:
        return matrix

    def write(self, hidden_CD: Tensor, part: Part, columns_C: Tensor, sums: TileSums, options: LossOptions) -> None:
        hidden_size, dtype = hidden_CD.shape[1], sums.totals_TC.dtype
        # A library may look at addresses as well: the operands of each product are copied to the same ones.
        hidden_MD = torch.zeros(ROWS, hidden_size, dtype=dtype)
        weight_WD = torch.zeros(WIDTH, hidden_size, dtype=dtype)
        bias_W = None if part.bias_V is None else torch.zeros(WIDTH, dtype=dtype)
        products_MW = torch.empty(ROWS, WIDTH, dtype=dtype)
        for tile, columns in enumerate(chunks(len(part.weight_VD), WIDTH)):
            width = columns.stop - columns.start
            weight_WD[:width], weight_WD[width:] = part.weight_VD[columns], 0
            if bias_W is not None and part.bias_V is not None:
                bias_W[:width] = part.bias_V[columns]
            for rows in chunks(len(hidden_CD), ROWS):
                count = rows.stop - rows.start
                hidden_MD[:count] = hidden_CD[rows]
                products_MW.zero_()
                for depth in chunks(hidden_size, DEPTH):
                    products_MW.addmm_(hidden_MD[:, depth], weight_WD[:, depth].T)
                logits_MW = logits_of_products(products_MW, bias_W, options, dtype)
                target_M = torch.full((ROWS,), -1)
                target_M[:count] = columns_C[rows] - columns.start
                first = part.tiles.start * WIDTH + columns.start
                _write_rows(logits_MW, width, target_M, sums, (tile, rows), first)

    def join(self, sums: TileSums, targets_C: Tensor, results: RowResults) -> None:
        maxima_TC, totals_TC, dots_TC, places_TC, target_C = sums
        rival_C, tile_C = maxima_TC.amax(0), maxima_TC.argmax(0)
        top_C = torch.maximum(rival_C, target_C)
        above_TC = (maxima_TC - top_C).clamp_(min=-1e4)
        shrink_TC = (maxima_TC - top_C).exp_()
        dots_C = _sum_in_pairs((dots_TC + totals_TC * above_TC).mul_(shrink_TC))
        others_C = _sum_in_pairs(totals_TC * shrink_TC)
        below_C = target_C - top_C
        own_C = below_C.exp()
        total_C = others_C + own_C
        # A confident row's 1 - p has digits that one plus it has not.
        normalizer_C = torch.where(own_C == 1, others_C.log1p(), total_C.log())
        lse_C, nll_C = top_C + normalizer_C, normalizer_C - below_C
        mean_C = (dots_C + own_C * below_C.clamp(min=-1e4)) / total_C
        # As in ``rows_torch``: a gradient subtracts the entropy from logarithms of the same log-sum-exp.
        entropy_C = torch.where(nll_C < CONFIDENT, normalizer_C, lse_C - top_C) - mean_C
        results.lse.copy_(lse_C)
        results.nll.copy_(nll_C)
        results.entropy.copy_(entropy_C)
        torch.gt(target_C, rival_C, out=results.correct)
        if results.top1 is not None:
            entry_C = places_TC.gather(0, tile_C[None])[0].long()
            results.top1.copy_(torch.where(target_C >= rival_C, targets_C, entry_C))

    def logits_of(self, columns: Tensor, inputs: Inputs, options: LossOptions, logits: Tensor) -> None:
        hidden_ND, weight_VD, bias_V, _ = inputs
        if not len(weight_VD):
            return
        for rows in chunks(len(hidden_ND), ROWS):
            columns_CK = columns[rows].clamp(min=0)
            products_CK = (weight_VD[columns_CK].to(logits) * hidden_ND[rows, None].to(logits)).sum(-1)
            bias_CK = None if bias_V is None else bias_V[columns_CK]
            logits_CK = logits_of_products(products_CK, bias_CK, options, logits.dtype)
            logits[rows] = logits_CK.where(columns[rows] >= 0, 0)


def _write_rows(
    logits_MW: Tensor, width: int, target_M: Tensor, sums: TileSums, place: tuple[int, slice], first: int
) -> None:
    """Write the sums of a tile's logits, which it changes; ``first`` is the tile's first entry."""
    tile, rows = place
    count = rows.stop - rows.start
    logits_MW[:, width:] = -torch.inf
    mine_M = (target_M >= 0) & (target_M < width)
    column_M1 = target_M.where(mine_M, 0)[:, None]
    logit_M1 = logits_MW.gather(1, column_M1)
    sums.targets_C[rows] = torch.where(mine_M, logit_M1[:, 0], 0)[:count] + sums.targets_C[rows]
    logits_MW.scatter_(1, column_M1, logit_M1.masked_fill(mine_M[:, None], -torch.inf))
    maximum_M1 = logits_MW.amax(1, keepdim=True).clamp_(min=LOWEST)
    below_MW = logits_MW - maximum_M1
    e_MW = below_MW.exp()
    sums.maxima_TC[tile, rows] = maximum_M1[:count, 0]
    sums.totals_TC[tile, rows] = e_MW.sum(1)[:count]
    sums.dots_TC[tile, rows] = e_MW.mul_(below_MW.clamp_(min=-1e4)).sum(1)[:count]
    sums.places_TC[tile, rows] = (logits_MW.argmax(1)[:count] + first).int()


def _sum_in_pairs(numbers_TC: Tensor) -> Tensor:
    """Return the sum over tiles, by a tree that depends on their number alone."""
    while len(numbers_TC) > 1:
        half = len(numbers_TC) // 2
        numbers_TC = torch.cat([numbers_TC[:half] + numbers_TC[half : 2 * half], numbers_TC[2 * half :]])
    return numbers_TC[0]
