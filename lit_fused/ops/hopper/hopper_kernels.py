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

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lit_fused.ops.chunks import TILE_ROWS
from lit_fused.ops.hopper import hopper_path
from lit_fused.ops.hopper.hopper_path import TILE_COLUMNS, ExactRows, PartialSums, RowFactors
from lit_fused.ops.kernel_path import Inputs, RowResults
from lit_fused.ops.logits.rows_triton import NEVER, tanh
from lit_fused.ops.options import LossOptions
from lit_fused.ops.products import Products

TILE_DEPTH = 64

LN_2 = tl.constexpr(math.log(2))
MAX_EXCESS = tl.constexpr(hopper_path.MAX_EXCESS)


def logit_constants(options: LossOptions) -> dict[str, float | bool]:
    """Return three factors and a switch that make logits in units of log 2 of products and bias: see ``_capped``."""
    in_units = math.log2(math.e)
    if options.softcap is None:
        return {"inner": options.scale * in_units, "bias_factor": in_units, "cap": 0.0, "HAS_SOFTCAP": False}
    cap = options.softcap
    return {"inner": options.scale / cap, "bias_factor": 1 / cap, "cap": cap * in_units, "HAS_SOFTCAP": True}


class HopperKernels(Products):
    """Launches the kernels. Every tensor that they write is given to them."""

    def multiprocessors(self, device: torch.device) -> int:
        if device.type == "cuda":
            return torch.cuda.get_device_properties(device).multi_processor_count
        return 4  # Triton's interpreter

    def target_logits(self, inputs: Inputs, options: LossOptions, logits_N: Tensor) -> None:
        """Write the logits of the targets, zero for ignored rows. float32"""
        hidden_ND, weight_VD, bias_V, targets_N = inputs
        _target_logit[(len(hidden_ND),)](
            hidden_ND,
            hidden_ND.stride(0),
            weight_VD,
            weight_VD.stride(0),
            bias_V,
            targets_N,
            logits_N,
            hidden_ND.shape[1],
            **logit_constants(options),
            BLOCK=min(triton.next_power_of_2(hidden_ND.shape[1]), 1024),
        )

    def numerators(
        self,
        inputs: Inputs,
        shift_C: Tensor,
        numerators_CV: Tensor | None,
        partial: PartialSums | None,
        options: LossOptions,
    ) -> None:
        """Write exp2(logits - shift), zero at the target, times the softcap's derivative; and each tile's sums."""
        hidden_CD, weight_VD, bias_V, targets_C = inputs
        (rows, hidden_size), vocabulary = hidden_CD.shape, len(weight_VD)
        programs = self.multiprocessors(hidden_CD.device)
        out = None
        if numerators_CV is not None:
            out = TensorDescriptor.from_tensor(numerators_CV, [TILE_ROWS, TILE_COLUMNS // 2])
        _numerators[(programs,)](
            TensorDescriptor.from_tensor(hidden_CD, [TILE_ROWS, TILE_DEPTH]),
            TensorDescriptor.from_tensor(weight_VD, [TILE_COLUMNS, TILE_DEPTH]),
            out,
            bias_V,
            targets_C,
            shift_C,
            None if partial is None else partial.maxima_TC,
            None if partial is None else partial.sums_TC,
            None if partial is None else partial.dots_TC,
            rows,
            vocabulary,
            hidden_size,
            **logit_constants(options),
            STATISTICS=partial is not None and options.statistics,
            PROGRAMS=programs,
            ROWS=TILE_ROWS,
            COLUMNS=TILE_COLUMNS,
            DEPTH=TILE_DEPTH,
            num_warps=8,
            num_stages=3,
        )

    def finish_rows(
        self,
        partial: PartialSums,
        targets_C: Tensor,
        target_logits_C: Tensor,
        factor: Tensor | None,
        results: RowResults,
        factors: RowFactors,
        options: LossOptions,
    ) -> None:
        """Join the tiles' sums: write the results of each row, its factors, and its final shift."""
        tiles, rows = partial.sums_TC.shape
        block = 8
        _finish_rows[(triton.cdiv(rows, block),)](
            partial.maxima_TC,
            partial.sums_TC,
            partial.dots_TC,
            partial.shifts_C,
            targets_C,
            target_logits_C,
            factor,
            results.loss,
            results.lse,
            results.nll,
            results.entropy,
            results.correct.view(torch.int8),
            factors.row_N,
            factors.target_N,
            rows,
            tiles,
            (options.softcap or 0.0) * math.log2(math.e),
            options.z_loss,
            HAS_SOFTCAP=options.softcap is not None,
            STATISTICS=options.statistics,
            ROWS=block,
            TILES=128,
        )

    def unify_shifts(self, numerators_CV: Tensor, partial: PartialSums, target_logits_C: Tensor) -> None:
        """Bring rows in which a tile took a shift of its own to their final shift; nearly always there are none."""
        tiles, rows = partial.sums_TC.shape
        _unify_shifts[(rows,)](
            numerators_CV,
            numerators_CV.stride(0),
            partial.maxima_TC,
            partial.shifts_C,
            target_logits_C,
            rows,
            tiles,
            numerators_CV.shape[1],
            COLUMNS=TILE_COLUMNS,
        )

    def finish_hidden(
        self,
        product_CD: Tensor,
        weight_VD: Tensor,
        targets_C: Tensor,
        factors: RowFactors,
        scale: float,
        out_CD: Tensor,
    ) -> None:
        """Write ``out = scale * (r * product - t * W[target])``."""
        rows, hidden_size = product_CD.shape
        block = min(triton.next_power_of_2(hidden_size), 1024)
        _finish_hidden[(rows, triton.cdiv(hidden_size, block))](
            product_CD,
            weight_VD,
            weight_VD.stride(0),
            targets_C,
            factors.row_N,
            factors.target_N,
            out_CD,
            hidden_size,
            scale,
            BLOCK=block,
        )

    def add_columns(self, numerators_CV: Tensor, row_factors_C: Tensor, sums_V: Tensor) -> None:
        """Add ``r @ numerators`` to the sums. float32"""
        rows, width = numerators_CV.shape
        _add_columns[(triton.cdiv(width, 128),)](
            numerators_CV, numerators_CV.stride(0), row_factors_C, sums_V, rows, width, ROWS=16, COLUMNS=128
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
        sorted_targets_N, order_N = order
        block = min(triton.next_power_of_2(hidden_size), 256)
        _subtract_targets[(tokens, triton.cdiv(hidden_size, block))](
            sorted_targets_N,
            order_N,
            factors.target_N,
            hidden_ND,
            weight_sums_VD,
            bias_sums_V,
            None if exact is None else exact.slots_V,
            None if exact is None else exact.sums_FD,
            tokens,
            hidden_size,
            scale,
            FEW=4,
            MANY=8,
            BLOCK=block,
            num_warps=1,  # more would share each step's tokens and meet in shared memory: 8 times slower
        )

    def scale_(self, tensor: Tensor, factor: Tensor) -> None:
        """Multiply a contiguous tensor by a scalar on the device, in place."""
        block = 4096
        programs = min(triton.cdiv(tensor.numel(), block), 16 * self.multiprocessors(tensor.device))
        _scale[(programs,)](tensor, factor, tensor.numel(), BLOCK=block)


@triton.jit
def _capped(x, cap, HAS_SOFTCAP: tl.constexpr):
    """Logits in units of log 2 from ``inner * products + bias_factor * bias``."""
    if HAS_SOFTCAP:
        x = cap * tanh(x)
    return x


@triton.jit
def cap_derivative(x, cap):
    ratio = tl.maximum(x, -cap) / cap  # an entry that is left out is far below the cap
    return 1 - ratio * ratio


@triton.jit
def _target_logit(
    hidden,
    hidden_stride,
    weight,
    weight_stride,
    bias,
    targets,
    logits,
    hidden_size,
    inner,
    bias_factor,
    cap,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row).to(tl.int64)
    if target < 0:
        tl.store(logits + row, 0.0)
    else:
        dot = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, hidden_size, BLOCK):
            d = start + tl.arange(0, BLOCK)
            h = tl.load(hidden + row * hidden_stride + d, mask=d < hidden_size, other=0.0).to(tl.float32)
            w = tl.load(weight + target * weight_stride + d, mask=d < hidden_size, other=0.0).to(tl.float32)
            dot += h * w
        x = inner * tl.sum(dot, 0)
        if bias is not None:
            x = tl.maximum(x + bias_factor * tl.load(bias + target).to(tl.float32), NEVER, tl.PropagateNan.ALL)
        tl.store(logits + row, _capped(x, cap, HAS_SOFTCAP))


@triton.jit
def halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right columns of a tile that is to be stored: the whole would not fit into shared memory beside
    the tiles that are being loaded."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def tile_logits(
    products,
    bias,
    targets,
    row,
    rows,
    first_column,
    vocabulary,
    inner,
    bias_factor,
    cap,
    HAS_SOFTCAP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Logits of a tile of products; NEVER at the rows' targets and beyond the end of the vocabulary."""
    column = tl.arange(0, COLUMNS)  # within the tile, as are targets and the vocabulary's end
    end = vocabulary - first_column
    target = tl.load(targets + row, mask=row < rows, other=-1).to(tl.int32) - first_column
    x = products * inner
    if bias is not None:
        b = tl.load(bias + first_column + column, mask=column < end, other=0.0).to(tl.float32)
        x += (bias_factor * b)[None, :]
        x = tl.maximum(x, NEVER, tl.PropagateNan.ALL)  # a masked vocabulary entry has the bias -inf
    x = _capped(x, cap, HAS_SOFTCAP)
    holds_target = tl.max(((target >= 0) & (target < COLUMNS)).to(tl.int32), 0) > 0
    if holds_target or end < COLUMNS:
        x = tl.where((column[None, :] < end) & (column[None, :] != target[:, None]), x, NEVER)
    return x


@triton.jit(do_not_specialize=["rows"])
def _numerators(
    hidden_tiles,
    weight_tiles,
    out_tiles,
    bias,
    targets,
    shifts,
    maxima,
    sums,
    dots,
    rows,
    vocabulary,
    hidden_size,
    inner,
    bias_factor,
    cap,
    HAS_SOFTCAP: tl.constexpr,
    STATISTICS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
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
        x = tile_logits(
            products,
            bias,
            targets,
            row,
            rows,
            first_column,
            vocabulary,
            inner,
            bias_factor,
            cap,
            HAS_SOFTCAP,
            COLUMNS,
        )
        place = column_tile * rows + row
        if maxima is not None:
            maximum = tl.max(x, 1)
            tl.store(maxima + place, maximum, mask=row < rows)
            shift = tl.where(maximum - shift > MAX_EXCESS, maximum, shift)
        numerators = tl.exp2(x - shift[:, None])
        if sums is not None:
            tl.store(sums + place, tl.sum(numerators, 1), mask=row < rows)
        if STATISTICS:
            tl.store(dots + place, tl.sum(numerators * x, 1), mask=row < rows)
        if out_tiles is not None:
            if HAS_SOFTCAP:
                numerators *= cap_derivative(x, cap)
            left, right = halves(numerators, ROWS, COLUMNS)
            out_tiles.store([first_row, first_column], left.to(out_tiles.dtype))
            out_tiles.store([first_row, first_column + COLUMNS // 2], right.to(out_tiles.dtype))


@triton.jit(do_not_specialize=["rows"])
def _finish_rows(
    maxima,
    sums,
    dots,
    shifts,
    targets,
    target_logits,
    factor,
    loss_out,
    lse_out,
    nll_out,
    entropy_out,
    correct_out,
    row_factors,
    target_factors,
    rows,
    tiles,
    cap,
    z_loss,
    HAS_SOFTCAP: tl.constexpr,
    STATISTICS: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    maximum = tl.full((ROWS,), NEVER, tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        mask = (tile < tiles)[:, None] & inside[None, :]
        place = tile[:, None] * rows + row[None, :]
        maximum = tl.maximum(maximum, tl.max(tl.load(maxima + place, mask=mask, other=NEVER), 0))

    estimate = tl.load(target_logits + row, mask=inside, other=0.0)
    shift = tl.where(maximum - estimate > MAX_EXCESS, maximum, estimate)
    others = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS,), tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        mask = (tile < tiles)[:, None] & inside[None, :]
        place = tile[:, None] * rows + row[None, :]
        tile_maximum = tl.load(maxima + place, mask=mask, other=NEVER)
        own = tl.where(tile_maximum - estimate[None, :] > MAX_EXCESS, tile_maximum, estimate[None, :])
        to_shift = tl.exp2(own - shift[None, :])
        others += tl.sum(tl.load(sums + place, mask=mask, other=0.0) * to_shift, 0)
        if STATISTICS:
            weighted += tl.sum(tl.load(dots + place, mask=mask, other=0.0) * to_shift, 0)

    valid = inside & (tl.load(targets + row, mask=inside, other=-1) >= 0)
    logit = tl.where(valid, estimate, NEVER)
    own_numerator = tl.exp2(logit - shift)
    total = tl.where(valid, others + own_numerator, 1.0)
    lse = (shift + tl.log2(total)) * LN_2
    nll = (shift - logit + tl.log2(total)) * LN_2
    probability = own_numerator / total

    row_factor = (1 + 2 * z_loss * lse) / total
    target_factor = others / total - 2 * z_loss * lse * probability  # 1 - p (1 + 2 z lse), without cancellation
    if HAS_SOFTCAP:
        target_factor *= cap_derivative(logit, cap)
    if factor is not None:
        f = tl.load(factor)
        row_factor *= f
        target_factor *= f
    tl.store(shifts + row, shift, mask=inside)
    tl.store(row_factors + row, tl.where(valid, row_factor, 0.0), mask=inside)
    tl.store(target_factors + row, tl.where(valid, target_factor, 0.0), mask=inside)
    tl.store(loss_out + row, nll + z_loss * lse * lse, mask=valid)
    tl.store(lse_out + row, lse, mask=valid)
    tl.store(nll_out + row, nll, mask=valid)
    if STATISTICS:
        entropy = lse - LN_2 * (weighted + own_numerator * logit) / total
        tl.store(entropy_out + row, entropy, mask=valid)
        tl.store(correct_out + row, (logit > maximum).to(tl.int8), mask=valid)


@triton.jit(do_not_specialize=["rows"])
def _unify_shifts(numerators, stride, maxima, shifts, target_logits, rows, tiles, vocabulary, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    shift = tl.load(shifts + row)
    estimate = tl.load(target_logits + row)
    if shift != estimate:
        for tile in range(0, tiles):
            maximum = tl.load(maxima + tile * rows + row)
            own = tl.where(maximum - estimate > MAX_EXCESS, maximum, estimate)
            column = tile * COLUMNS + tl.arange(0, COLUMNS)
            place = numerators + row * stride + column
            values = tl.load(place, mask=column < vocabulary, other=0.0).to(tl.float32)
            values *= tl.exp2(own - shift)
            tl.store(place, values.to(numerators.dtype.element_ty), mask=column < vocabulary)


@triton.jit
def _finish_hidden(
    product,
    weight,
    weight_stride,
    targets,
    row_factors,
    target_factors,
    out,
    hidden_size,
    scale,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.maximum(tl.load(targets + row), 0).to(tl.int64)  # an ignored row's factors are zero
    p = tl.load(product + row * hidden_size + d, mask=d < hidden_size, other=0.0)
    w = tl.load(weight + target * weight_stride + d, mask=d < hidden_size, other=0.0).to(tl.float32)
    gradient = tl.load(row_factors + row) * p - tl.load(target_factors + row) * w
    tl.store(out + row * hidden_size + d, (scale * gradient).to(out.dtype.element_ty), mask=d < hidden_size)


@triton.jit(do_not_specialize=["rows"])
def _add_columns(numerators, stride, row_factors, sums, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    # Rows are summed across the tile at the end only: threads would have to meet in every step.
    totals = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        values = tl.load(numerators + row[:, None].to(tl.int64) * stride + column[None, :], mask=mask, other=0.0)
        factor = tl.load(row_factors + row, mask=row < rows, other=0.0)
        totals += values.to(tl.float32) * factor[:, None]
    tl.store(sums + column, tl.load(sums + column, mask=inside) + tl.sum(totals, 0), mask=inside)


@triton.jit
def _target_terms(
    start, target, sorted_targets, order, target_factors, hidden, tokens, hidden_size, d, TOKENS: tl.constexpr
):
    """Sums of t * h and of t over the next tokens of a target, and whether there are more."""
    position = start + tl.arange(0, TOKENS)
    same = (position < tokens) & (tl.load(sorted_targets + position, mask=position < tokens, other=-1) == target)
    token = tl.load(order + position, mask=same, other=0)
    factor = tl.load(target_factors + token, mask=same, other=0.0)
    mask = same[:, None] & (d < hidden_size)[None, :]
    h = tl.load(hidden + token[:, None] * hidden_size + d[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.sum(h * factor[:, None], 0), tl.sum(factor, 0), tl.min(same.to(tl.int32), 0) > 0


@triton.jit(do_not_specialize=["tokens"])
def _subtract_targets(
    sorted_targets,
    order,
    target_factors,
    hidden,
    weight_sums,
    bias_sums,
    exact_slots,
    exact_sums,
    tokens,
    hidden_size,
    scale,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """At the first token of each target, walk all tokens of that target: most have few, the most frequent hundreds, so
    the first step is small and the others are large."""
    first = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(sorted_targets + first)
    before = tl.load(sorted_targets + tl.maximum(first - 1, 0))
    if (target >= 0) & ((first == 0) | (before != target)):
        terms, factors, more = _target_terms(
            first, target, sorted_targets, order, target_factors, hidden, tokens, hidden_size, d, FEW
        )
        start = first + FEW
        while more:
            next_terms, next_factors, more = _target_terms(
                start, target, sorted_targets, order, target_factors, hidden, tokens, hidden_size, d, MANY
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


@triton.jit
def _scale(tensor, factor, count, BLOCK: tl.constexpr):
    f = tl.load(factor).to(tl.float32)
    if f != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
            place = start + tl.arange(0, BLOCK)
            values = tl.load(tensor + place, mask=place < count, other=0.0)
            tl.store(tensor + place, (values.to(tl.float32) * f).to(values.dtype), mask=place < count)
