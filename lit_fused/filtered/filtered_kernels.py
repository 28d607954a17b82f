# Kernels are typed by Triton's compiler, not by Python's rules.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
"""The Triton kernels of ``filtered_hopper``: the exact kernels' work on columns whose number the device alone knows.

The exact path's product runs over a block of kept columns, whose rows of the weight are gathered before; two more
products carry its numerators to the gradients, ours because programs beyond the number of columns have to end at once.

B columns of a block, C rows of a chunk, D hidden, R rows of a group, S parts of a sum, T tiles, V vocabulary. Logits
are in units of log 2.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_fused.filtered.filtered_hopper import ColumnBlock, ExactRule
from lit_fused.ops.hopper.hopper_kernels import (
    COLUMNS,
    DEPTH,
    JOINED_ROWS,
    JOINED_TILES,
    PRODUCT,
    ROWS,
    SUMMED_COLUMNS,
    TILE_DEPTH,
    UNIFIED_TILES,
    HopperKernels,
    above_final_shift,
    cap_derivative,
    column_sums,
    halves,
    in_tiles,
    slots_and_sums,
    write_numerators,
)
from lit_fused.ops.hopper.hopper_rows import TILE_COLUMNS, ExactRows, PartialSums
from lit_fused.ops.kernel_path import Inputs
from lit_fused.ops.logits.rows_triton import NEVER
from lit_fused.ops.options import TILE_ROWS, LossOptions

REST = tl.constexpr(128)  # columns of a tile in the last addition to the weight's gradient


def _place(block: ColumnBlock | None, width: int) -> tuple[Tensor | None, int, int]:
    """Return the count of a group's kept columns, the first place of a block, and its width; or that of all columns."""
    return (None, 0, width) if block is None else (block.count, block.first, block.width)


class FilteredKernels(HopperKernels):
    """Launches the filter's kernels beside the exact ones."""

    def numerators(
        self,
        inputs: Inputs,
        shift_C: Tensor,
        numerators_CV: Tensor | None,
        partial: PartialSums | None,
        options: LossOptions,
        weights: Sequence[Tensor] = (),
        stored_TC: Tensor | None = None,
        block: ColumnBlock | None = None,
    ) -> None:
        """Write what the exact kernels write, and each tile's sums of the numerators as they are stored.

        With a block, weight and bias are those of its columns, targets are places in it, statistics are left out, and
        what lies beyond its count is left as it is, but for zeros up to the end of a tile.
        """
        if partial is None or (stored_TC is None and block is None):
            return super().numerators(inputs, shift_C, numerators_CV, partial, options, weights)
        sums = (*partial.written(block is None and options.statistics), stored_TC, None)
        rows = (inputs.targets_N, shift_C, *(weights or (None, None)))
        place = _place(block, len(inputs.weight_VD))
        arguments = self.product_arguments(inputs, rows, numerators_CV, sums, place, options)
        _filter_numerators[arguments[-1:]](*arguments, **PRODUCT)

    def small_mass(
        self,
        numerators_CV: Tensor,
        row_factors_C: Tensor,
        eps: float,
        rule: ExactRule,
        maxima: tuple[Tensor, Tensor] | None,
        options: LossOptions,
    ) -> None:
        """Write ``rule.small_C``: each row's sum of those r * numerators that do not exceed eps. float32

        With the ``maxima`` of all tiles (T, C) and the final shifts (C,), zero for a row that, as they show without its
        numerators, is not exact alone: it is not read.
        """
        rows, width = numerators_CV.shape
        block = min(triton.next_power_of_2(width), 4096)
        cap = None if options.softcap is None else options.softcap * math.log2(math.e)
        known = None if maxima is None else (*maxima, rule.nll_C, rule.lse_C, rule.z_loss, rule.most)
        tensors = (numerators_CV, numerators_CV.stride(0), row_factors_C, rule.small_C)
        _small_mass[(rows,)](*tensors, known, cap, rows, width, float(eps), BLOCK=block, num_warps=8)

    def add_mass(
        self,
        stored_TC: Tensor,
        maxima_TC: Tensor,
        estimates_C: Tensor,
        shifts_C: Tensor,
        row_factors_C: Tensor,
        mass_C: Tensor,
        block: ColumnBlock | None = None,
        *,
        sign: int = 1,
        rule: ExactRule | None = None,
    ) -> None:
        """Add ``sign * r *`` a row's stored sum to the mass; r is of the final shifts, the tiles' were estimates. With
        a ``rule``, first write which rows are exact alone, and for them r = 0."""
        tiles, rows = stored_TC.shape
        tensors = (stored_TC, maxima_TC, estimates_C, shifts_C, row_factors_C, mass_C)
        if rule is not None:
            rule = rule._replace(exact_C=rule.exact_C.view(torch.int8))
        place = _place(block, tiles * TILE_COLUMNS)
        _add_mass[(triton.cdiv(rows, JOINED_ROWS.value),)](*tensors, rule and tuple(rule), place, rows, sign)

    def gather(
        self, weight_VD: Tensor, bias_V: Tensor | None, block: ColumnBlock, out_BD: Tensor, bias_out_B: Tensor | None
    ) -> None:
        """Copy the block's rows of weight and bias together, and the last one again to the end of the last tile."""
        hidden_size = weight_VD.shape[1]
        tensors = (weight_VD, weight_VD.stride(0), bias_V, block.columns, out_BD, bias_out_B)
        constants = {"BLOCK": min(triton.next_power_of_2(hidden_size), 2048)}
        programs = 16 * self.multiprocessors(weight_VD.device)
        _gather[(programs,)](*tensors, _place(block, block.width), hidden_size, **constants)

    def multiply_kept(
        self, numerators_RB: Tensor, weight_BD: Tensor, block: ColumnBlock, out_SRD: Tensor, *, add: bool
    ) -> None:
        """Write numerators @ weight as a sum over S of ``out``, or with ``add`` add it. float32"""
        (parts, rows, hidden_size), programs = out_SRD.shape, self.multiprocessors(out_SRD.device)
        p, w = in_tiles(numerators_RB, TILE_ROWS, TILE_DEPTH), in_tiles(weight_BD, TILE_DEPTH, TILE_COLUMNS)
        constants = {"ADD": add, "PARTS": parts, "PROGRAMS": programs} | PRODUCT
        _multiply_kept[(programs,)](p, w, out_SRD, _place(block, block.width), rows, hidden_size, **constants)

    def add_kept_rows(
        self,
        numerators_RB: Tensor,
        hidden_RD: Tensor,
        block: ColumnBlock,
        sums_VD: Tensor,
        exact: ExactRows | None,
        writers_V: Tensor,
        turn: int,
    ) -> None:
        """Add numerators.T @ hidden to the block's rows of ``sums``, or write it where the turn is the writer's; and
        add it to ``exact`` where that has a slot."""
        (rows, hidden_size), programs = hidden_RD.shape, self.multiprocessors(hidden_RD.device)
        p, h = in_tiles(numerators_RB, TILE_DEPTH, TILE_ROWS), in_tiles(hidden_RD, TILE_DEPTH, TILE_COLUMNS)
        tensors = (p, h, block.columns, (sums_VD, writers_V), slots_and_sums(exact), _place(block, block.width))
        _add_kept_rows[(programs,)](*tensors, turn, rows, hidden_size, programs, **PRODUCT)

    def finish_weight(self, whole_EV: Tensor, hidden_ED: Tensor, sums_VD: Tensor, writers_V: Tensor, turn: int) -> None:
        """Add ``whole.T @ hidden`` to all rows of the sums, or write it where the turn is the writer's."""
        (vocabulary, hidden_size), depth = sums_VD.shape, len(whole_EV)
        rows = 256 // sums_VD.itemsize  # A tile of float32 is half as high: three of them are in shared memory.
        p, h = in_tiles(whole_EV, TILE_ROWS, rows), in_tiles(hidden_ED, TILE_ROWS, REST.value)
        tiles = triton.cdiv(hidden_size, REST.value)
        programs = tiles * max(self.multiprocessors(sums_VD.device) // tiles, 1)
        out, sums = in_tiles(sums_VD, rows, REST.value), (sums_VD, writers_V)
        constants = {"ROWS_OF_TILE": rows, "PARTS": triton.cdiv(depth, TILE_ROWS), "num_warps": 4}
        _finish_weight[(programs,)](p, h, out, sums, turn, vocabulary, hidden_size, **constants)

    def add_filter_columns(
        self,
        numerators_CV: Tensor,
        row_factors_C: Tensor,
        sums_V: Tensor,
        largest_V: Tensor | None = None,
        block: ColumnBlock | None = None,
    ) -> None:
        """Add ``r @ numerators`` to the sums, float32, and keep the largest of r * numerators; of a block's columns."""
        rows, width = numerators_CV.shape
        tensors = (numerators_CV, numerators_CV.stride(0), row_factors_C, sums_V, largest_V)
        _add_filter_columns[(triton.cdiv(width, SUMMED_COLUMNS.value),)](
            *tensors, None if block is None else block.columns, _place(block, width), rows
        )


@triton.jit
def _width(place):
    """Return the width of a block of columns; of all columns without a count."""
    count, first, width = place
    if count is not None:
        width = tl.minimum(tl.maximum(tl.load(count) - first, 0), width)
    return width


@triton.jit(do_not_specialize=["rows"])
def _filter_numerators(
    hidden_tiles, weight_tiles, out_tiles, head, of_rows, sums, rows, place, hidden_size, PROGRAMS: tl.constexpr
):
    width = _width(place)
    write_numerators(hidden_tiles, weight_tiles, out_tiles, head, of_rows, sums, rows, width, hidden_size, PROGRAMS)


@triton.jit
def _gradient_mass(nll):
    """1 - exp(-nll), without cancellation."""
    return tl.where(nll < 2**-7, nll * (1 - nll / 2 * (1 - nll / 3)), 1 - tl.exp(-nll))


@triton.jit
def _large_maxima(maxima, shift, cap, row, rows, tiles, factor, eps):
    """The sum of the largest entries of the row's tiles, of those that exceed eps."""
    large = tl.zeros((UNIFIED_TILES,), tl.float32)
    for start in range(0, tiles, UNIFIED_TILES):
        tile = start + tl.arange(0, UNIFIED_TILES)
        maximum = tl.load(maxima + tile.to(tl.int64) * rows + row, mask=tile < tiles, other=NEVER)
        entry = factor * tl.exp2(maximum - shift)
        if cap is not None:
            entry *= cap_derivative(maximum, cap)
        large += tl.where(entry > eps, entry, 0.0)
    return tl.sum(large, 0)


@triton.jit(do_not_specialize=["rows"])
def _small_mass(numerators, stride, row_factors, mass, known, cap, rows, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(row_factors + row)
    end = width
    if known is not None:
        maxima, shifts, nlls, lses, z_loss, most = known
        large = _large_maxima(maxima, tl.load(shifts + row), cap, row, rows, tl.cdiv(width, COLUMNS), factor, eps)
        gradient_mass = _gradient_mass(tl.load(nlls + row))
        whole = (1 + 2 * z_loss * tl.load(lses + row)) * gradient_mass
        end = tl.where(whole - large <= most * gradient_mass, 0, width)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        entry = factor * tl.load(numerators + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
        total += tl.where(entry > eps, 0.0, entry)
    tl.store(mass + row, tl.sum(total, 0))


@triton.jit(do_not_specialize=["rows"])
def _add_mass(parts, maxima, estimates, shifts, row_factors, mass, rule, place, rows, sign):
    row = tl.program_id(0) * JOINED_ROWS + tl.arange(0, JOINED_ROWS)
    inside = row < rows
    tiles = tl.cdiv(_width(place), COLUMNS)
    estimate = tl.load(estimates + row, mask=inside, other=0.0)
    shift = tl.load(shifts + row, mask=inside, other=0.0)
    total = tl.zeros((JOINED_ROWS,), tl.float32)
    for start in range(0, tiles, JOINED_TILES):
        tile = start + tl.arange(0, JOINED_TILES)
        mask = (tile < tiles)[:, None] & inside[None, :]
        entry = tile[:, None] * rows + row[None, :]
        above = above_final_shift(maxima, entry, mask, estimate[None, :], shift[None, :])
        total += tl.sum(tl.load(parts + entry, mask=mask, other=0.0) * tl.exp2(above), 0)
    factor = tl.load(row_factors + row, mask=inside, other=0.0)
    if rule is not None:
        small, nlls, lses, exact, z_loss, most = rule
        bound = most * _gradient_mass(tl.load(nlls + row, mask=inside, other=0.0))
        turned = 1 + 2 * z_loss * tl.load(lses + row, mask=inside, other=0.0) < 0
        filtered = (tl.load(small + row, mask=inside, other=0.0) <= bound) & (turned == 0)  # not if NaN
        tl.store(exact + row, (filtered == 0).to(tl.int8), mask=inside)
        factor = tl.where(filtered, factor, 0.0)
        tl.store(row_factors + row, factor, mask=inside)
    tl.store(mass + row, tl.load(mass + row, mask=inside, other=0.0) + sign * factor * total, mask=inside)


@triton.jit
def _gather(weight, weight_stride, bias, columns, out, bias_out, place, hidden_size, BLOCK: tl.constexpr):
    width, first = _width(place), place[1]
    for row in range(tl.program_id(0).to(tl.int64), tl.cdiv(width, COLUMNS) * COLUMNS, tl.num_programs(0)):
        column = tl.load(columns + first + tl.minimum(row, width - 1)).to(tl.int64)
        for start in range(0, hidden_size, BLOCK):
            d = start + tl.arange(0, BLOCK)
            values = tl.load(weight + column * weight_stride + d, mask=d < hidden_size)
            tl.store(out + row * hidden_size + d, values, mask=d < hidden_size)
        if bias is not None:
            tl.store(bias_out + row, tl.load(bias + column))


@triton.jit(do_not_specialize=["rows"])
def _multiply_kept(
    numerator_tiles,
    weight_tiles,
    out,
    place,
    rows,
    hidden_size,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Each part sums over its share of the block's columns."""
    steps = tl.cdiv(_width(place), DEPTH)
    share = tl.cdiv(steps, PARTS)
    row_tiles = tl.cdiv(rows, ROWS)
    tiles = row_tiles * tl.cdiv(hidden_size, COLUMNS)
    if not ADD or steps > 0:
        for tile in range(tl.program_id(0), PARTS * tiles, PROGRAMS):
            part = tile // tiles
            first_row = (tile % row_tiles) * ROWS
            first_column = (tile % tiles) // row_tiles * COLUMNS
            product = tl.zeros((ROWS, COLUMNS), tl.float32)
            for step in range(part * share, tl.minimum((part + 1) * share, steps)):
                p = numerator_tiles.load([first_row, step * DEPTH])
                w = weight_tiles.load([step * DEPTH, first_column])
                product = tl.dot(p, w, product)
            row = first_row + tl.arange(0, ROWS)
            out_rows = out + (part * rows + row).to(tl.int64) * hidden_size
            left, right = halves(product)
            added = row < rows if ADD else None
            _put(left, out_rows, first_column, row < rows, hidden_size, added)
            _put(right, out_rows, first_column + COLUMNS // 2, row < rows, hidden_size, added)


@triton.jit
def _put(values, rows, first_column, inside, width, added):
    """Write a tile to rows of a matrix, some columns of those that are inside; or add it, to rows of ``added``."""
    column = first_column + tl.arange(0, values.shape[1])
    place = rows[:, None] + column[None, :]
    narrow = (column < width)[None, :]
    if added is not None:
        values += tl.load(place, mask=added[:, None] & narrow, other=0.0).to(tl.float32)
    tl.store(place, values.to(rows.dtype.element_ty), mask=inside[:, None] & narrow)


@triton.jit(do_not_specialize=["turn", "rows"])
def _add_kept_rows(
    numerator_tiles,
    hidden_tiles,
    columns,
    sums,
    exact,
    place,
    turn,
    rows,
    hidden_size,
    PROGRAMS: tl.constexpr,
):
    width, first = _width(place), place[1]
    column_tiles = tl.cdiv(hidden_size, COLUMNS)
    for tile in tl.range(tl.program_id(0), tl.cdiv(width, ROWS) * column_tiles, PROGRAMS, flatten=True):
        first_kept = tile // column_tiles * ROWS
        first_column = tile % column_tiles * COLUMNS
        product = tl.zeros((ROWS, COLUMNS), tl.float32)
        for row in range(0, rows, DEPTH):
            p = numerator_tiles.load([row, first_kept])
            h = hidden_tiles.load([row, first_column])
            product = tl.dot(p.T, h, product)

        kept = first_kept + tl.arange(0, ROWS)
        inside = kept < width
        vocabulary_row = tl.load(columns + first + kept, mask=inside, other=0)
        left, right = halves(product)
        _add_rows(left, sums, exact, vocabulary_row, inside, turn, first_column, hidden_size)
        _add_rows(right, sums, exact, vocabulary_row, inside, turn, first_column + COLUMNS // 2, hidden_size)


@triton.jit
def _add_rows(values, sums, exact, vocabulary_row, inside, turn, first_column, hidden_size):
    """Add a tile to rows of the sums, and to those that have a slot in ``exact``: they will replace the former."""
    exact_slots, exact_sums = exact
    if exact_slots is not None:
        slot = tl.load(exact_slots + vocabulary_row, mask=inside, other=-1)
        if tl.max(slot, 0) >= 0:
            has_slot = slot >= 0
            exact_rows = exact_sums + slot.to(tl.int64) * hidden_size
            _put(values, exact_rows, first_column, has_slot, hidden_size, has_slot)
    sums, writers = sums
    written = tl.load(writers + vocabulary_row, mask=inside, other=turn) < turn
    _put(values, sums + vocabulary_row.to(tl.int64) * hidden_size, first_column, inside, hidden_size, written)


@triton.jit(do_not_specialize=["turn"])
def _finish_weight(
    whole_tiles,
    hidden_tiles,
    out_tiles,
    sums,
    turn,
    vocabulary,
    hidden_size,
    ROWS_OF_TILE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A program stays with some columns, whose hidden states it keeps, and fetches the next rows while it writes."""
    sums, writers = sums
    column_tiles = tl.cdiv(hidden_size, REST)
    first_column = tl.program_id(0) % column_tiles * REST
    column = first_column + tl.arange(0, REST)
    hidden = hidden_tiles.load([0, first_column])
    lanes = tl.num_programs(0) // column_tiles
    for tile in tl.range(tl.program_id(0) // column_tiles, tl.cdiv(vocabulary, ROWS_OF_TILE), lanes, num_stages=3):
        first_row = tile * ROWS_OF_TILE
        row = first_row + tl.arange(0, ROWS_OF_TILE)
        written = tl.load(writers + row, mask=row < vocabulary, other=turn) < turn
        mask = written[:, None] & (column < hidden_size)[None, :]
        old = tl.load(sums + row[:, None].to(tl.int64) * hidden_size + column[None, :], mask=mask, other=0.0)
        product = tl.dot(whole_tiles.load([0, first_row]).T, hidden)
        for part in tl.static_range(1, PARTS):  # where the groups are more than fit beside the exact rows
            more = whole_tiles.load([part * ROWS, first_row])
            product = tl.dot(more.T, hidden_tiles.load([part * ROWS, first_column]), product)
        out_tiles.store([first_row, first_column], (product + old.to(tl.float32)).to(sums.dtype.element_ty))


@triton.jit(do_not_specialize=["rows"])
def _add_filter_columns(numerators, stride, row_factors, sums, largest, columns, place, rows):
    width = _width(place)
    column = tl.program_id(0) * SUMMED_COLUMNS + tl.arange(0, SUMMED_COLUMNS)
    inside = column < width
    if tl.program_id(0) * SUMMED_COLUMNS < width:
        total, maximum = column_sums(numerators, stride, row_factors, rows, column, inside, largest is not None)
        if columns is not None:
            column = tl.load(columns + place[1] + column, mask=inside, other=0)
        tl.store(sums + column, tl.load(sums + column, mask=inside) + total, mask=inside)
        if largest is not None:
            old = tl.load(largest + column, mask=inside, other=0.0)
            tl.store(largest + column, tl.maximum(maximum, old), mask=inside)
