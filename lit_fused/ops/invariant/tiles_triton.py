# Kernels are typed by Triton's compiler, not by Python's rules.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
"""The tiles of ``invariant_path`` as Triton kernels for a Hopper GPU.

The product is persistent, as that of ``hopper_kernels``. A tile's shape depends on the dtype alone, never on the number
of rows, and whatever is optional elsewhere is always computed: another variant of a kernel may round otherwise.

C rows of a chunk, D hidden, T tiles, V vocabulary. Logits are in units of log 2, for exp2.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..hopper.hopper_kernels import LN_2, HopperKernels, head_of, in_tiles, logits_of_products
from ..kernel_path import Inputs, RowResults
from ..logits.rows_triton import NEVER
from ..options import LossOptions
from ..products import with_aligned_rows
from .tile_sums import Part, TileSums

JOINED_ROWS, JOINED_TILES = tl.constexpr(8), tl.constexpr(128)  # joined in a step
NO_ENTRY = tl.constexpr(2**31 - 1)


class TileShape(NamedTuple):
    """The shape of a tile's product, and how it is computed."""

    rows: int
    width: int
    depth: int
    warps: int
    stages: int


HALF = TileShape(128, 256, 64, warps=8, stages=4)
FLOAT32 = TileShape(64, 128, 16, warps=8, stages=3)  # without tensor cores: of a larger one, registers spill


class TritonTiles(HopperKernels):
    """Computes tiles on a GPU."""

    invariant = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.shape = FLOAT32 if dtype == torch.float32 else HALF
        self.width = self.shape.width

    def aligned(self, matrix: Tensor) -> Tensor:
        """Return the matrix, or a copy whose rows begin where the copy engine can fetch them."""
        stride, itemsize = matrix.stride(0), matrix.itemsize
        if matrix.stride(1) == 1 and stride * itemsize % 16 == 0 and matrix.data_ptr() % 16 == 0:
            return matrix
        return with_aligned_rows(matrix, *matrix.shape).copy_(matrix)

    def write(self, hidden_CD: Tensor, part: Part, columns_C: Tensor, sums: TileSums, options: LossOptions) -> None:
        (rows, hidden_size), vocabulary = hidden_CD.shape, len(part.weight_VD)
        programs, shape = self.multiprocessors(hidden_CD.device), self.shape
        tiles = in_tiles(hidden_CD, shape.rows, shape.depth), in_tiles(part.weight_VD, shape.width, shape.depth)
        first = part.tiles.start * shape.width
        # One dot product in float32 has half the error of the tensor cores' sum.
        of_part = Inputs(hidden_CD.contiguous(), part.weight_VD, part.bias_V, columns_C)
        logits_C = torch.empty_like(sums.targets_C)
        super().logits_of(columns_C, of_part, options, logits_C)
        sums.targets_C.add_(logits_C)
        arguments = (*tiles, head_of(part.bias_V, options), columns_C, tuple(sums[:-1]), rows, vocabulary, first)
        constants = {"ROWS": shape.rows, "COLUMNS": shape.width, "DEPTH": shape.depth, "PROGRAMS": programs}
        _write_tiles[(programs,)](*arguments, hidden_size, **constants, num_warps=shape.warps, num_stages=shape.stages)

    def join(self, sums: TileSums, targets_C: Tensor, results: RowResults) -> None:
        tiles, rows = sums.totals_TC.shape
        written = results.lse, results.nll, results.entropy, results.correct.view(torch.int8), results.top1
        _join_tiles[(triton.cdiv(rows, JOINED_ROWS.value),)](tuple(sums), targets_C, written, rows, tiles)

    def logits_of(self, columns: Tensor, inputs: Inputs, options: LossOptions, logits: Tensor) -> None:
        """Write the logits of K columns of each row, zero where negative, in nats."""
        super().logits_of(columns, inputs, options, logits)
        logits.mul_(math.log(2))


@triton.jit(do_not_specialize=["rows", "vocabulary", "first_entry"])
def _write_tiles(
    hidden_tiles,
    weight_tiles,
    head,
    columns,
    sums,
    rows,
    vocabulary,
    first_entry,
    hidden_size,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    maxima, totals, dots, places = sums
    row_tiles = tl.cdiv(rows, ROWS)
    for tile in tl.range(tl.program_id(0), row_tiles * tl.cdiv(vocabulary, COLUMNS), PROGRAMS, flatten=True):
        first_row = (tile % row_tiles) * ROWS
        column_tile = tile // row_tiles
        first_column = column_tile * COLUMNS
        products = tl.zeros((ROWS, COLUMNS), tl.float32)
        for d in range(0, hidden_size, DEPTH):
            h = hidden_tiles.load([first_row, d])
            w = weight_tiles.load([first_column, d])
            products = tl.dot(h, w.T, products, input_precision="ieee")

        row = first_row + tl.arange(0, ROWS)
        column = tl.arange(0, COLUMNS)  # within the tile, as are targets and the vocabulary's end
        end = vocabulary - first_column
        target = tl.load(columns + row, mask=row < rows, other=-1).to(tl.int32) - first_column
        bias = None
        if head[0] is not None:
            bias = tl.load(head[0] + first_column + column, mask=column < end, other=0.0).to(tl.float32)[None, :]
        x = logits_of_products(products, bias, head)
        holds_target = tl.max(((target >= 0) & (target < COLUMNS)).to(tl.int32), 0) > 0
        if holds_target or end < COLUMNS:
            x = tl.where((column[None, :] < end) & (column[None, :] != target[:, None]), x, NEVER)
        maximum = tl.max(x, 1)
        below = x - maximum[:, None]
        e = tl.exp2(below)
        first = tl.min(tl.where(below == 0, column[None, :], COLUMNS), 1)
        place = column_tile * rows + row
        tl.store(maxima + place, maximum, mask=row < rows)
        tl.store(totals + place, tl.sum(e, 1), mask=row < rows)
        tl.store(dots + place, tl.sum(e * below, 1), mask=row < rows)
        tl.store(places + place, first_entry + first_column + first, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _join_tiles(sums, targets, results, rows, tiles):
    maxima, totals, dots, places, target_logits = sums
    lse_out, nll_out, entropy_out, correct_out, top1_out = results
    row = tl.program_id(0) * JOINED_ROWS + tl.arange(0, JOINED_ROWS)
    inside = row < rows
    rival = tl.full((JOINED_ROWS,), NEVER, tl.float32)
    for start in range(0, tiles, JOINED_TILES):
        tile = start + tl.arange(0, JOINED_TILES)
        mask = (tile < tiles)[:, None] & inside[None, :]
        place = tile[:, None] * rows + row[None, :]
        rival = tl.maximum(rival, tl.max(tl.load(maxima + place, mask=mask, other=NEVER), 0))

    logit = tl.load(target_logits + row, mask=inside, other=0.0)
    top = tl.maximum(rival, logit)
    others = tl.zeros((JOINED_ROWS,), tl.float32)
    weighted = tl.zeros((JOINED_ROWS,), tl.float32)
    entry = tl.full((JOINED_ROWS,), NO_ENTRY, tl.int32)
    for start in range(0, tiles, JOINED_TILES):
        tile = start + tl.arange(0, JOINED_TILES)
        mask = (tile < tiles)[:, None] & inside[None, :]
        place = tile[:, None] * rows + row[None, :]
        maximum = tl.load(maxima + place, mask=mask, other=NEVER)
        above = maximum - top[None, :]
        shrink = tl.exp2(above)
        total = tl.load(totals + place, mask=mask, other=0.0)
        dot = tl.load(dots + place, mask=mask, other=0.0)
        others += tl.sum(total * shrink, 0)
        weighted += tl.sum((dot + total * above) * shrink, 0)
        of_tile = tl.load(places + place, mask=mask, other=NO_ENTRY)
        entry = tl.minimum(entry, tl.min(tl.where(maximum == rival[None, :], of_tile, NO_ENTRY), 0))

    target = tl.load(targets + row, mask=inside, other=-1)
    valid = inside & (target >= 0)
    below = logit - top
    own = tl.exp2(below)
    total = others + own
    tl.store(lse_out + row, (top + tl.log2(total)) * LN_2, mask=valid)
    tl.store(nll_out + row, (tl.log2(total) - below) * LN_2, mask=valid)
    tl.store(entropy_out + row, (tl.log2(total) - (weighted + own * below) / total) * LN_2, mask=valid)
    tl.store(correct_out + row, (logit > rival).to(tl.int8), mask=valid)
    if top1_out is not None:
        tl.store(top1_out + row, tl.where(logit >= rival, target, entry), mask=valid)
