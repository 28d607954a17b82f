# Kernels are typed by Triton's compiler, not by Python's rules.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
"""The Triton kernels of ``hopper_path``: the product whose epilogue is a softmax's numerator, and what surrounds it.

The product is persistent: one program per multiprocessor walks the tiles, so that the loads of the next tile run under
the epilogue of this one. Tiles of one column of the vocabulary follow each other, so that the weight is read from
memory once per chunk.

C rows of a chunk, D hidden, F rows of the weight that are summed apart, N tokens, T tiles of the vocabulary, V
vocabulary. Logits are in units of log 2.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..kernel_path import Inputs, RowResults
from ..logits.rows_triton import NEVER, scale_unless_one_, tanh
from ..options import TILE_ROWS, LossOptions
from ..products import Products
from . import hopper_rows
from .hopper_rows import GROUP_TILES, TILE_COLUMNS, ExactRows, PartialSums, RowFactors

TILE_DEPTH = 64
ROWS, COLUMNS = tl.constexpr(TILE_ROWS), tl.constexpr(TILE_COLUMNS)
DEPTH = tl.constexpr(TILE_DEPTH)
JOINED_ROWS, JOINED_TILES = tl.constexpr(8), tl.constexpr(128)  # joined in a step
SUMMED_ROWS, SUMMED_COLUMNS = tl.constexpr(16), tl.constexpr(128)  # added to the sums of columns in a step
GROUP = tl.constexpr(GROUP_TILES)
UNIFIED_TILES = tl.constexpr(256)  # by a program
FEW, MANY = tl.constexpr(4), tl.constexpr(8)  # tokens of a target in the first and in any other step
PRODUCT = {"num_warps": 8, "num_stages": 3}

LN_2 = tl.constexpr(math.log(2))
MAX_EXCESS = tl.constexpr(hopper_rows.MAX_EXCESS)


def head_of(bias_V: Tensor | None, options: LossOptions) -> tuple[Tensor | float | None, ...]:
    """Return the bias, and three factors that make logits in units of log 2 of products and bias: see ``_capped``."""
    in_units, cap = math.log2(math.e), options.softcap
    if cap is None:
        return bias_V, options.scale * in_units, in_units, None
    return bias_V, options.scale / cap, 1 / cap, cap * in_units


class HopperKernels(Products):
    """Launches the kernels. Every tensor that they write is given to them."""

    invariant = False  # whether single logits have the same bits wherever the operands lie in memory

    @staticmethod
    @cache
    def multiprocessors(device: torch.device) -> int:
        if device.type == "cuda":
            return torch.cuda.get_device_properties(device).multi_processor_count
        return 4  # Triton's interpreter

    def logits_of(self, columns: Tensor, inputs: Inputs, options: LossOptions, logits: Tensor) -> None:
        """Write the logits of one column (N,) or of K columns (N, K) per row, zero where negative. float32"""
        hidden_ND, weight_VD, bias_V, _ = inputs
        tokens, hidden_size = hidden_ND.shape
        if columns.numel():
            block = min(triton.next_power_of_2(hidden_size), 1024)
            matrices, of_each = (hidden_ND, weight_VD, weight_VD.stride(0)), columns.numel() // tokens
            arguments = (*matrices, head_of(bias_V, options), columns, logits, of_each, hidden_size)
            logit_of = _logit_of_anywhere if self.invariant else _logit_of
            logit_of[(columns.numel(),)](*arguments, BLOCK=block)

    def numerators(
        self,
        inputs: Inputs,
        shift_C: Tensor,
        numerators_CV: Tensor | None,
        partial: PartialSums | None,
        options: LossOptions,
        weights: Sequence[Tensor] = (),
    ) -> None:
        """Write exp2(logits - shift), zero at the target, times the softcap's derivative; and each tile's sums. With
        ``weights`` (C,), times ``base + slope * log(exp2(logits - shift))``."""
        sums = (None,) * 5 if partial is None else (*partial.written(options.statistics), None, partial.places_TC)
        rows = (inputs.targets_N, shift_C, *(weights or (None, None)))
        arguments = self.product_arguments(inputs, rows, numerators_CV, sums, len(inputs.weight_VD), options)
        write_numerators[arguments[-1:]](*arguments, **PRODUCT)

    def product_arguments(
        self,
        inputs: Inputs,
        of_rows: tuple[Tensor | None, ...],
        numerators_CV: Tensor | None,
        sums: tuple[Tensor | None, ...],
        columns: Any,
        options: LossOptions,
    ) -> tuple[Any, ...]:
        """Return the arguments of ``write_numerators``, of which the number of programs is the last."""
        hidden_CD, weight_VD, bias_V, _ = inputs
        (rows, hidden_size), programs = hidden_CD.shape, self.multiprocessors(hidden_CD.device)
        h, w = in_tiles(hidden_CD, TILE_ROWS, TILE_DEPTH), in_tiles(weight_VD, TILE_COLUMNS, TILE_DEPTH)
        out = None if numerators_CV is None else in_tiles(numerators_CV, TILE_ROWS, TILE_COLUMNS // 2)
        head = head_of(bias_V, options)
        return h, w, out, head, of_rows, sums, rows, columns, hidden_size, programs

    def finish_rows(
        self,
        partial: PartialSums,
        targets_C: Tensor,
        target_logits_C: Tensor,
        factor_C: Tensor | None,
        results: RowResults,
        factors: RowFactors,
        options: LossOptions,
    ) -> None:
        """Join the tiles' sums: write the results of each row, its factors, and its final shift."""
        tiles, rows = partial.sums_TC.shape
        cap = None if options.softcap is None else options.softcap * math.log2(math.e)
        written = (*results[:4], results.correct.view(torch.int8))
        of_rows = (targets_C, target_logits_C, factor_C, written, tuple(factors))
        _finish_rows[(triton.cdiv(rows, JOINED_ROWS.value),)](
            tuple(partial[:4]), *of_rows, rows, tiles, cap, options.z_loss, STATISTICS=options.statistics
        )

    def join_tiles(
        self, partial: PartialSums, target_logits_C: Tensor, joined: PartialSums, options: LossOptions
    ) -> None:
        """Write the sums of each group of GROUP_TILES tiles, with a shift by the rule of a tile."""
        tiles, rows = partial.sums_TC.shape
        grid = (triton.cdiv(rows, JOINED_ROWS.value), len(joined.sums_TC))
        sums = (partial[:3], joined[:3])
        _join_tiles[grid](*sums, target_logits_C, rows, tiles, STATISTICS=options.statistics)

    def unify_shifts(self, numerators_CV: Tensor, partial: PartialSums, target_logits_C: Tensor) -> None:
        """Bring rows in which a tile took a shift of its own to their final shift; nearly always there are none."""
        tiles, rows = partial.sums_TC.shape
        shifts = (partial.maxima_TC, partial.shifts_C, target_logits_C)
        matrix = (numerators_CV, numerators_CV.stride(0))
        _unify_shifts[(rows, triton.cdiv(tiles, UNIFIED_TILES.value))](
            *matrix, *shifts, rows, tiles, numerators_CV.shape[1]
        )

    def scale_rows(self, hidden_CD: Tensor, factor_C: Tensor, scale: float, out_CD: Tensor) -> None:
        """Write the rows times their factors and ``scale``."""
        rows, hidden_size = hidden_CD.shape
        block = min(triton.next_power_of_2(hidden_size), 1024)
        grid = rows, triton.cdiv(hidden_size, block)
        _scale_rows[grid](hidden_CD, factor_C, out_CD, hidden_size, scale, BLOCK=block)

    def finish_hidden(
        self,
        product_SCD: Tensor,
        weight_VD: Tensor,
        targets_C: Tensor,
        factors: RowFactors,
        scale: float,
        out_CD: Tensor,
        shifts: tuple[Tensor, Tensor, Tensor] | None = None,
        dropped: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Write ``out = scale * (r * product - t * W[target] + outer(*dropped))``; the product is a sum of S parts.

        ``shifts``: each part's maxima (S, C), of which its shift follows, the estimates (C,) and the final shifts (C,),
        if they differ. ``dropped``: (C,) and (D,).
        """
        *parts, rows, hidden_size = product_SCD.shape
        block = min(triton.next_power_of_2(hidden_size), 1024)
        tensors = (product_SCD, shifts, weight_VD, weight_VD.stride(0), targets_C, tuple(factors), dropped, out_CD)
        _finish_hidden[(rows, triton.cdiv(hidden_size, block))](
            *tensors, math.prod(parts), hidden_size, scale, BLOCK=block
        )

    def add_columns(self, numerators_CV: Tensor, row_factors_C: Tensor, sums_V: Tensor) -> None:
        """Add ``r @ numerators`` to the sums. float32"""
        rows, width = numerators_CV.shape
        _add_columns[(triton.cdiv(width, SUMMED_COLUMNS.value),)](
            numerators_CV, numerators_CV.stride(0), row_factors_C, sums_V, rows, width
        )

    def subtract_targets(
        self,
        hidden_ND: Tensor,
        order: tuple[Tensor, Tensor],
        factors: RowFactors,
        scale: float,
        weight_sums_VD: Tensor | None,
        bias_sums_V: Tensor | None,
        exact: ExactRows | None,
    ) -> None:
        """Write dW[y] -= scale * sum(t * h) and db[y] -= sum(t) over the tokens with target y, each sum in float32.

        ``order``: the targets (N,) sorted, and the tokens that they belong to. Where ``exact`` has a slot for the row,
        its sum takes the place of dW's.
        """
        tokens, hidden_size = hidden_ND.shape
        block = min(triton.next_power_of_2(hidden_size), 256)
        tensors = (order, factors.target_N, hidden_ND, (weight_sums_VD, bias_sums_V, *slots_and_sums(exact)))
        # More warps would share each step's tokens and meet in shared memory: 8 times slower.
        _subtract_targets[(tokens, triton.cdiv(hidden_size, block))](
            *tensors, tokens, hidden_size, scale, BLOCK=block, num_warps=1
        )

    def fill_rows(self, row_D: Tensor, out_VD: Tensor) -> None:
        """Write ``row_D`` as every row of ``out``, which is contiguous."""
        block = 4096
        _fill_rows[(triton.cdiv(out_VD.numel(), block),)](row_D, out_VD, out_VD.numel(), len(row_D), BLOCK=block)

    def scale_(self, tensor: Tensor, factor: Tensor) -> None:
        scale_unless_one_(tensor, factor)


def in_tiles(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


def slots_and_sums(exact: ExactRows | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if exact is None else (exact.slots_V, exact.sums_FD)


@triton.jit
def _capped(x, cap):
    """Logits in units of log 2 from ``inner * products + bias_factor * bias``."""
    if cap is not None:
        x = cap * tanh(x)
    return x


@triton.jit
def logits_of_products(products, bias, head):
    """Logits, given the bias of each as it is broadcast over the products."""
    _, inner, bias_factor, cap = head
    x = products * inner
    if bias is not None:
        x = tl.maximum(x + bias_factor * bias, NEVER, tl.PropagateNan.ALL)  # a masked entry has the bias -inf
    return _capped(x, cap)


@triton.jit
def cap_derivative(x, cap):
    ratio = tl.maximum(x, -cap) / cap  # an entry that is left out is far below the cap
    return 1 - ratio * ratio


@triton.jit
def _logit_of(hidden, weight, weight_stride, head, columns, logits, of_each, hidden_size, BLOCK: tl.constexpr):
    bias, inner, bias_factor, cap = head
    place = tl.program_id(0).to(tl.int64)
    row = place // of_each
    column = tl.load(columns + place).to(tl.int64)
    if column < 0:
        tl.store(logits + place, 0.0)
    else:
        dot = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, hidden_size, BLOCK):
            d = start + tl.arange(0, BLOCK)
            h = tl.load(hidden + row * hidden_size + d, mask=d < hidden_size, other=0.0).to(tl.float32)
            w = tl.load(weight + column * weight_stride + d, mask=d < hidden_size, other=0.0).to(tl.float32)
            dot += h * w
        x = inner * tl.sum(dot, 0)
        if bias is not None:
            x = tl.maximum(x + bias_factor * tl.load(bias + column).to(tl.float32), NEVER, tl.PropagateNan.ALL)
        tl.store(logits + place, _capped(x, cap))


# Triton compiles a kernel for what it finds of addresses and strides, and its vectors decide the order of a sum.
_OPERANDS = ["hidden", "weight", "weight_stride"]
_logit_of_anywhere = triton.jit(_logit_of.fn, do_not_specialize=_OPERANDS, do_not_specialize_on_alignment=_OPERANDS)


@triton.jit
def halves(tile):
    """Split a tile to be stored into left and right: whole, it does not fit into shared memory beside those loaded."""
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _tile_logits(products, head, targets, row, rows, first_column, vocabulary):
    """Logits of a tile of products; NEVER at the rows' targets and beyond the end of the vocabulary."""
    column = tl.arange(0, COLUMNS)  # within the tile, as are targets and the vocabulary's end
    end = vocabulary - first_column
    target = tl.load(targets + row, mask=row < rows, other=-1).to(tl.int32) - first_column
    b = None
    if head[0] is not None:
        b = tl.load(head[0] + first_column + column, mask=column < end, other=0.0).to(tl.float32)[None, :]
    x = logits_of_products(products, b, head)
    holds_target = tl.max(((target >= 0) & (target < COLUMNS)).to(tl.int32), 0) > 0
    if holds_target or end < COLUMNS:
        x = tl.where((column[None, :] < end) & (column[None, :] != target[:, None]), x, NEVER)
    return x


@triton.jit(do_not_specialize=["rows"])
def write_numerators(
    hidden_tiles, weight_tiles, out_tiles, head, of_rows, outputs, rows, vocabulary, hidden_size, PROGRAMS: tl.constexpr
):
    """Each tile's maxima, sums and sums of products with the logits are those of numerators without the softcap's
    derivative, the stored sums those of numerators as they are stored."""
    _, _, _, cap = head
    targets, shifts, bases, slopes = of_rows
    maxima, sums, dots, stored_sums, places = outputs
    row_tiles = tl.cdiv(rows, ROWS)
    for tile in tl.range(tl.program_id(0), row_tiles * tl.cdiv(vocabulary, COLUMNS), PROGRAMS, flatten=True):
        first_row = (tile % row_tiles) * ROWS
        column_tile = tile // row_tiles
        first_column = column_tile * COLUMNS
        products = tl.zeros((ROWS, COLUMNS), tl.float32)
        for d in range(0, hidden_size, DEPTH):
            h = hidden_tiles.load([first_row, d])
            w = weight_tiles.load([first_column, d])
            products = tl.dot(h, w.T, products)

        row = first_row + tl.arange(0, ROWS)
        shift = tl.load(shifts + row, mask=row < rows, other=0.0)
        x = _tile_logits(products, head, targets, row, rows, first_column, vocabulary)
        place = column_tile * rows + row
        if maxima is not None:
            maximum = tl.max(x, 1)
            tl.store(maxima + place, maximum, mask=row < rows)
            shift = tl.where(maximum - shift > MAX_EXCESS, maximum, shift)
            if places is not None:
                column = first_column + tl.arange(0, COLUMNS)
                tl.store(
                    places + place,
                    tl.min(tl.where(x == maximum[:, None], column[None, :], vocabulary), 1),
                    mask=row < rows,
                )
        numerators = tl.exp2(x - shift[:, None])
        if sums is not None:
            tl.store(sums + place, tl.sum(numerators, 1), mask=row < rows)
        if dots is not None:
            tl.store(dots + place, tl.sum(numerators * (x - shift[:, None]), 1), mask=row < rows)
        if out_tiles is not None:
            if bases is not None:
                base = tl.load(bases + row, mask=row < rows, other=0.0)
                slope = tl.load(slopes + row, mask=row < rows, other=0.0) * LN_2
                numerators *= (base - slope * shift)[:, None] + slope[:, None] * x
            if cap is not None:
                numerators *= cap_derivative(x, cap)
            if stored_sums is not None:
                tl.store(stored_sums + place, tl.sum(numerators, 1), mask=row < rows)
            left, right = halves(numerators)
            out_tiles.store([first_row, first_column], left.to(out_tiles.dtype))
            out_tiles.store([first_row, first_column + COLUMNS // 2], right.to(out_tiles.dtype))


@triton.jit
def above_final_shift(maxima, place, mask, estimate, shift):
    """Return by how much the shift of a tile's sums is above the final one."""
    maximum = tl.load(maxima + place, mask=mask, other=NEVER)
    own = tl.where(maximum - estimate > MAX_EXCESS, maximum, estimate)
    return own - shift


@triton.jit
def _joined(partial, estimate, row, rows, first, last, STATISTICS: tl.constexpr):
    """Maximum, shift, sum and sum of products with the logits of some tiles of each row."""
    maxima, sums, dots = partial[0], partial[1], partial[2]
    inside = row < rows
    maximum = tl.full((JOINED_ROWS,), NEVER, tl.float32)
    for start in range(first, last, JOINED_TILES):
        tile = start + tl.arange(0, JOINED_TILES)
        mask = (tile < last)[:, None] & inside[None, :]
        place = tile[:, None] * rows + row[None, :]
        maximum = tl.maximum(maximum, tl.max(tl.load(maxima + place, mask=mask, other=NEVER), 0))

    shift = tl.where(maximum - estimate > MAX_EXCESS, maximum, estimate)
    total = tl.zeros((JOINED_ROWS,), tl.float32)
    weighted = tl.zeros((JOINED_ROWS,), tl.float32)
    for start in range(first, last, JOINED_TILES):
        tile = start + tl.arange(0, JOINED_TILES)
        mask = (tile < last)[:, None] & inside[None, :]
        place = tile[:, None] * rows + row[None, :]
        above = above_final_shift(maxima, place, mask, estimate[None, :], shift[None, :])
        part = tl.load(sums + place, mask=mask, other=0.0) * tl.exp2(above)
        total += tl.sum(part, 0)
        if STATISTICS:
            dot = tl.load(dots + place, mask=mask, other=0.0) * tl.exp2(above)
            weighted += tl.sum(dot + part * above, 0)
    return maximum, shift, total, weighted


@triton.jit(do_not_specialize=["rows"])
def _join_tiles(partial, joined, target_logits, rows, tiles, STATISTICS: tl.constexpr):
    row = tl.program_id(0) * JOINED_ROWS + tl.arange(0, JOINED_ROWS)
    inside = row < rows
    estimate = tl.load(target_logits + row, mask=inside, other=0.0)
    group = tl.program_id(1)
    last = tl.minimum((group + 1) * GROUP, tiles)
    maximum, _, total, weighted = _joined(partial, estimate, row, rows, group * GROUP, last, STATISTICS)
    place = group * rows + row
    tl.store(joined[0] + place, maximum, mask=inside)
    tl.store(joined[1] + place, total, mask=inside)
    if STATISTICS:
        tl.store(joined[2] + place, weighted, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _finish_rows(
    partial, targets, target_logits, factor, results, factors, rows, tiles, cap, z_loss, STATISTICS: tl.constexpr
):
    loss_out, lse_out, nll_out, entropy_out, correct_out = results
    row_factors, target_factors = factors
    row = tl.program_id(0) * JOINED_ROWS + tl.arange(0, JOINED_ROWS)
    inside = row < rows
    estimate = tl.load(target_logits + row, mask=inside, other=0.0)
    maximum, shift, others, weighted = _joined(partial, estimate, row, rows, 0, tiles, STATISTICS)

    valid = inside & (tl.load(targets + row, mask=inside, other=-1) >= 0)
    logit = tl.where(valid, estimate, NEVER)
    own_numerator = tl.exp2(logit - shift)
    total = tl.where(valid, others + own_numerator, 1.0)
    lse = (shift + tl.log2(total)) * LN_2
    nll = (shift - logit + tl.log2(total)) * LN_2
    probability = own_numerator / total

    row_factor = (1 + 2 * z_loss * lse) / total
    target_factor = others / total - 2 * z_loss * lse * probability  # 1 - p (1 + 2 z lse), without cancellation
    if cap is not None:
        target_factor *= cap_derivative(logit, cap)
    if factor is not None:
        f = tl.load(factor + row, mask=inside, other=0.0)
        row_factor *= f
        target_factor *= f
    tl.store(partial[3] + row, shift, mask=inside)
    tl.store(row_factors + row, tl.where(valid, row_factor, 0.0), mask=inside)
    tl.store(target_factors + row, tl.where(valid, target_factor, 0.0), mask=inside)
    tl.store(loss_out + row, nll + z_loss * lse * lse, mask=valid)
    tl.store(lse_out + row, lse, mask=valid)
    tl.store(nll_out + row, nll, mask=valid)
    if STATISTICS:
        entropy = LN_2 * (tl.log2(total) - (weighted + own_numerator * (logit - shift)) / total)
        tl.store(entropy_out + row, entropy, mask=valid)
        tl.store(correct_out + row, (logit > maximum).to(tl.int8), mask=valid)


@triton.jit(do_not_specialize=["rows"])
def _unify_shifts(numerators, stride, maxima, shifts, target_logits, rows, tiles, vocabulary):
    row = tl.program_id(0).to(tl.int64)
    shift = tl.load(shifts + row)
    estimate = tl.load(target_logits + row)
    if shift != estimate:
        first = tl.program_id(1) * UNIFIED_TILES
        for tile in range(first, tl.minimum(first + UNIFIED_TILES, tiles)):
            maximum = tl.load(maxima + tile * rows + row)
            own = tl.where(maximum - estimate > MAX_EXCESS, maximum, estimate)
            column = tile * COLUMNS + tl.arange(0, COLUMNS)
            place = numerators + row * stride + column
            values = tl.load(place, mask=column < vocabulary, other=0.0).to(tl.float32)
            values *= tl.exp2(own - shift)
            tl.store(place, values.to(numerators.dtype.element_ty), mask=column < vocabulary)


@triton.jit
def _fill_rows(row, out, count, hidden_size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(row + place % hidden_size)
    tl.store(out + place, numbers.to(out.dtype.element_ty), mask=place < count)


@triton.jit
def _scale_rows(hidden, factors, out, hidden_size, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    h = tl.load(hidden + row * hidden_size + d, mask=d < hidden_size, other=0.0).to(tl.float32)
    scaled = h * (tl.load(factors + row) * scale)
    tl.store(out + row * hidden_size + d, scaled.to(out.dtype.element_ty), mask=d < hidden_size)


@triton.jit(do_not_specialize=["parts"])
def _finish_hidden(
    product,
    shifts,
    weight,
    weight_stride,
    targets,
    factors,
    dropped,
    out,
    parts,
    hidden_size,
    scale,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.maximum(tl.load(targets + row), 0).to(tl.int64)  # an ignored row's factors are zero
    p = tl.zeros((BLOCK,), tl.float32)
    for part in range(parts):
        place = part * rows + row
        of_part = tl.load(product + place * hidden_size + d, mask=d < hidden_size, other=0.0)
        if shifts is not None:
            maxima, estimates, final = shifts
            of_part *= tl.exp2(above_final_shift(maxima, place, True, tl.load(estimates + row), tl.load(final + row)))
        p += of_part
    w = tl.load(weight + target * weight_stride + d, mask=d < hidden_size, other=0.0).to(tl.float32)
    gradient = tl.load(factors[0] + row) * p - tl.load(factors[1] + row) * w
    if dropped is not None:
        gradient += tl.load(dropped[0] + row) * tl.load(dropped[1] + d, mask=d < hidden_size, other=0.0)
    tl.store(out + row * hidden_size + d, (scale * gradient).to(out.dtype.element_ty), mask=d < hidden_size)


@triton.jit
def column_sums(numerators, stride, row_factors, rows, column, inside, LARGEST: tl.constexpr):
    """The sums over rows of r * numerators in some columns, and with ``LARGEST`` the largest of them."""
    # Rows are joined across the tile at the end only: threads would have to meet in every step.
    totals = tl.zeros((SUMMED_ROWS, SUMMED_COLUMNS), tl.float32)
    maxima = tl.zeros((SUMMED_ROWS, SUMMED_COLUMNS), tl.float32)
    for start in range(0, rows, SUMMED_ROWS):
        row = start + tl.arange(0, SUMMED_ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        values = tl.load(numerators + row[:, None].to(tl.int64) * stride + column[None, :], mask=mask, other=0.0)
        values = values.to(tl.float32) * tl.load(row_factors + row, mask=row < rows, other=0.0)[:, None]
        totals += values
        if LARGEST:
            maxima = tl.maximum(maxima, values)
    return tl.sum(totals, 0), tl.max(maxima, 0)


@triton.jit(do_not_specialize=["rows"])
def _add_columns(numerators, stride, row_factors, sums, rows, width):
    column = tl.program_id(0) * SUMMED_COLUMNS + tl.arange(0, SUMMED_COLUMNS)
    inside = column < width
    total, _ = column_sums(numerators, stride, row_factors, rows, column, inside, LARGEST=False)
    tl.store(sums + column, tl.load(sums + column, mask=inside) + total, mask=inside)


@triton.jit
def _target_terms(start, target, order, target_factors, hidden, tokens, hidden_size, d, TOKENS: tl.constexpr):
    """Sums of t * h and of t over the next tokens of a target, and whether there are more."""
    sorted_targets, sorted_tokens = order
    position = start + tl.arange(0, TOKENS)
    same = (position < tokens) & (tl.load(sorted_targets + position, mask=position < tokens, other=-1) == target)
    token = tl.load(sorted_tokens + position, mask=same, other=0)
    factor = tl.load(target_factors + token, mask=same, other=0.0)
    mask = same[:, None] & (d < hidden_size)[None, :]
    h = tl.load(hidden + token[:, None] * hidden_size + d[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.sum(h * factor[:, None], 0), tl.sum(factor, 0), tl.min(same.to(tl.int32), 0) > 0


@triton.jit(do_not_specialize=["tokens"])
def _subtract_targets(order, target_factors, hidden, sums, tokens, hidden_size, scale, BLOCK: tl.constexpr):
    """Walk all tokens of a target at its first one: mostly few, sometimes hundreds, so a small step comes first."""
    sorted_targets = order[0]
    weight_sums, bias_sums, exact_slots, exact_sums = sums
    first = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(sorted_targets + first)
    before = tl.load(sorted_targets + tl.maximum(first - 1, 0))
    if (target >= 0) & ((first == 0) | (before != target)):
        terms, factors, more = _target_terms(first, target, order, target_factors, hidden, tokens, hidden_size, d, FEW)
        start = first + FEW
        while more:
            next_terms, next_factors, more = _target_terms(
                start, target, order, target_factors, hidden, tokens, hidden_size, d, MANY
            )
            terms += next_terms
            factors += next_factors
            start += MANY
        if weight_sums is not None:
            place = weight_sums + target.to(tl.int64) * hidden_size + d
            old = tl.load(place, mask=d < hidden_size, other=0.0).to(tl.float32)
            if exact_slots is not None:
                slot = tl.load(exact_slots + target)
                if slot >= 0:
                    old = tl.load(exact_sums + slot * hidden_size + d, mask=d < hidden_size, other=0.0)
            tl.store(place, (old - scale * terms).to(weight_sums.dtype.element_ty), mask=d < hidden_size)
        if bias_sums is not None and tl.program_id(1) == 0:
            tl.store(bias_sums + target, tl.load(bias_sums + target) - factors)
