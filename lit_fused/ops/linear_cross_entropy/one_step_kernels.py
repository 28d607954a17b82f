# Kernels are typed by Triton's compiler, not by Python's rules.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
"""The Triton kernels of ``one_step``: the product whose epilogue is a softmax's numerator, and what surrounds it.

The product is persistent: one program per multiprocessor walks the tiles, so that the loads of the next tile run under
the epilogue of this one. Tiles of one column of the vocabulary follow each other, so that the weight is read from
memory once per chunk.

With a filter, the same product runs over a block of kept columns, whose rows of the weight are gathered before; two
more products carry its numerators to the gradients. They are ours and not the vendor's because the number of columns
is read on the device: programs beyond it end at once.

B columns of a block, C rows of a chunk, D hidden, F rows of the weight that are summed apart, N tokens, R rows of a
group, S parts of a sum, T tiles of the vocabulary, V vocabulary. Logits are in units of log 2.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lit_fused.ops.linear_cross_entropy.plan import TILE_COLUMNS, TILE_ROWS, RowOptions, RowResults
from lit_fused.ops.linear_cross_entropy.rows_triton import NEVER, tanh

_TILE_DEPTH = 64

LN_2 = tl.constexpr(math.log(2))
# A tile in which a logit exceeds the row's shift by more than this many powers of two takes a shift of its own. A row's
# sum then stays below 2^(40 + 20) for any vocabulary below 2^20, far from float32's 2^127 even after a product.
MAX_EXCESS = tl.constexpr(40.0)


def empty_float32(*size: int, device: torch.device) -> Tensor:
    """Uninitialised, float32 whatever torch's default is: under bf16-true it is bfloat16."""
    return torch.empty(*size, dtype=torch.float32, device=device)


@dataclass
class RowFactors:
    """What a row's numerators lack, (N,) float32: zero for ignored rows."""

    row_N: Tensor  # r: of the numerators
    target_N: Tensor  # t: of the target's own term, 1 - p and what else depends on it

    @classmethod
    def empty(cls, count: int, device: torch.device) -> "RowFactors":
        return cls(*(empty_float32(count, device=device) for _ in range(2)))

    def __getitem__(self, rows: slice) -> "RowFactors":
        return RowFactors(self.row_N[rows], self.target_N[rows])


@dataclass
class PartialSums:
    """What each tile knows about its part of a row, the target's entry left out; and the shift that all tiles of a row
    are brought to. float32."""

    maxima_TC: Tensor  # of the logits
    sums_TC: Tensor  # of the numerators
    dots_TC: Tensor  # of numerators * logits
    shifts_C: Tensor
    stored_TC: Tensor | None = None  # of the numerators as they are stored, where that is not how they are summed

    @classmethod
    def empty(cls, tiles: int, rows: int, device: torch.device, *, stored: bool = False) -> "PartialSums":
        sums = (empty_float32(tiles, rows, device=device) for _ in range(3))
        return cls(
            *sums,
            shifts_C=empty_float32(rows, device=device),
            stored_TC=empty_float32(tiles, rows, device=device) if stored else None,
        )

    def of_rows(self, rows: int) -> "PartialSums":
        """The same memory for a chunk of fewer rows."""

        def part(sums_TC: Tensor) -> Tensor:
            tiles = len(sums_TC)
            return sums_TC.view(-1)[: tiles * rows].view(tiles, rows)

        return PartialSums(
            part(self.maxima_TC),
            part(self.sums_TC),
            part(self.dots_TC),
            self.shifts_C[:rows],
            None if self.stored_TC is None else part(self.stored_TC),
        )


@dataclass
class ColumnBlock:
    """Some of a group's kept columns: the places from ``first`` on, as many as fit and exist. How many, the device
    knows."""

    columns: Tensor  # (V,) int32, the group's kept columns
    count: Tensor  # () int32, how many of them
    first: int
    width: int  # at most


@dataclass
class ExactRows:
    """Rows of a weight's gradient that are summed in float32 beside it, until ``subtract_targets`` writes them into
    it: those of targets only."""

    rows_F: Tensor  # int64, which they are; beyond the targets any others
    slots_V: Tensor  # int32, the place of each target's row among them, or -1
    sums_FD: Tensor


def _logit_constants(options: RowOptions) -> dict[str, float | bool]:
    """Three factors and a switch that make logits in units of log 2 of products and bias: see ``_capped``."""
    in_units = math.log2(math.e)
    if options.softcap is None:
        return {"inner": options.scale * in_units, "bias_factor": in_units, "cap": 0.0, "HAS_SOFTCAP": False}
    cap = options.softcap
    return {"inner": options.scale / cap, "bias_factor": 1 / cap, "cap": cap * in_units, "HAS_SOFTCAP": True}


def target_logits(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, options: RowOptions
) -> Tensor:
    """(N,) float32, zero for ignored rows."""
    logits_N = torch.empty(len(hidden_ND), dtype=torch.float32, device=hidden_ND.device)
    _target_logit[(len(hidden_ND),)](
        hidden_ND,
        hidden_ND.stride(0),
        weight_VD,
        weight_VD.stride(0),
        bias_V,
        targets_N,
        logits_N,
        hidden_ND.shape[1],
        **_logit_constants(options),
        BLOCK=min(triton.next_power_of_2(hidden_ND.shape[1]), 1024),
    )
    return logits_N


def numerators(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_C: Tensor,
    shift_C: Tensor,
    numerators_CV: Tensor | None,
    partial: PartialSums | None,
    options: RowOptions,
    block: ColumnBlock | None = None,
) -> None:
    """Write exp2(logits - shift), zero at the target, times the softcap's derivative; and each tile's partial sums.

    With a block, weight and bias are those of its columns, targets are places in it, and what lies beyond its count is
    left as it is, but for zeros up to the end of a tile.
    """
    (rows, hidden_size), vocabulary = hidden_CD.shape, len(weight_VD)
    programs = multiprocessors(hidden_CD.device)
    out = None
    if numerators_CV is not None:
        out = TensorDescriptor.from_tensor(numerators_CV, [TILE_ROWS, TILE_COLUMNS // 2])
    _numerators[(programs,)](
        TensorDescriptor.from_tensor(hidden_CD, [TILE_ROWS, _TILE_DEPTH]),
        TensorDescriptor.from_tensor(weight_VD, [TILE_COLUMNS, _TILE_DEPTH]),
        out,
        bias_V,
        targets_C,
        shift_C,
        None if partial is None else partial.maxima_TC,
        None if partial is None else partial.sums_TC,
        None if partial is None else partial.dots_TC,
        None if partial is None else partial.stored_TC,
        *_place(block),
        rows,
        vocabulary,
        hidden_size,
        **_logit_constants(options),
        STATISTICS=partial is not None and options.statistics,
        PROGRAMS=programs,
        ROWS=TILE_ROWS,
        COLUMNS=TILE_COLUMNS,
        DEPTH=_TILE_DEPTH,
        num_warps=8,
        num_stages=3,
    )


def finish_rows(
    partial: PartialSums,
    targets_C: Tensor,
    target_logits_C: Tensor,
    factor: Tensor | None,
    results: RowResults,
    factors: RowFactors,
    options: RowOptions,
) -> None:
    """Join the tiles' sums: results of each row, its factors, and its final shift."""
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


def unify_shifts(numerators_CV: Tensor, partial: PartialSums, target_logits_C: Tensor) -> None:
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


def add_mass(
    partial: PartialSums,
    estimates_C: Tensor,
    shifts_C: Tensor,
    row_factors_C: Tensor,
    mass_C: Tensor,
    block: ColumnBlock | None = None,
    *,
    sign: int = 1,
) -> None:
    """mass += sign * r * (the row's sum of the stored numerators), where the tiles had these estimates as shifts and r
    belongs to the final ones."""
    tiles, rows = partial.sums_TC.shape
    _add_mass[(triton.cdiv(rows, 8),)](
        partial.sums_TC if partial.stored_TC is None else partial.stored_TC,
        partial.maxima_TC,
        estimates_C,
        shifts_C,
        row_factors_C,
        mass_C,
        *_place(block),
        tiles * TILE_COLUMNS if block is None else block.width,
        rows,
        sign,
        COLUMNS=TILE_COLUMNS,
        ROWS=8,
        TILES=128,
    )


def gather(
    weight_VD: Tensor, bias_V: Tensor | None, block: ColumnBlock, out_BD: Tensor, bias_out_B: Tensor | None
) -> None:
    """Copy the block's rows of the weight, and entries of the bias, next to each other; to the end of the last tile
    copies of the last one."""
    hidden_size = weight_VD.shape[1]
    _gather[(16 * multiprocessors(weight_VD.device),)](
        weight_VD,
        weight_VD.stride(0),
        bias_V,
        block.columns,
        out_BD,
        bias_out_B,
        *_place(block),
        block.width,
        hidden_size,
        COLUMNS=TILE_COLUMNS,
        BLOCK=min(triton.next_power_of_2(hidden_size), 2048),
    )


def multiply_kept(numerators_RB: Tensor, weight_BD: Tensor, block: ColumnBlock, out_SRD: Tensor, *, add: bool) -> None:
    """The sum over S of ``out`` becomes, or with ``add`` grows by, numerators @ weight. float32"""
    (parts, rows, hidden_size), programs = out_SRD.shape, multiprocessors(out_SRD.device)
    _multiply_kept[(programs,)](
        TensorDescriptor.from_tensor(numerators_RB, [TILE_ROWS, _TILE_DEPTH]),
        TensorDescriptor.from_tensor(weight_BD, [_TILE_DEPTH, TILE_COLUMNS]),
        out_SRD,
        *_place(block),
        block.width,
        rows,
        hidden_size,
        ADD=add,
        PARTS=parts,
        PROGRAMS=programs,
        ROWS=TILE_ROWS,
        COLUMNS=TILE_COLUMNS,
        DEPTH=_TILE_DEPTH,
        num_warps=8,
        num_stages=3,
    )


def add_kept_rows(
    numerators_RB: Tensor, hidden_RD: Tensor, block: ColumnBlock, sums_VD: Tensor, exact: ExactRows | None
) -> None:
    """The rows of ``sums`` that are the block's columns grow by numerators.T @ hidden; where ``exact`` has a slot for
    the row, its sum does instead."""
    hidden_size, programs = hidden_RD.shape[1], multiprocessors(hidden_RD.device)
    _add_kept_rows[(programs,)](
        TensorDescriptor.from_tensor(numerators_RB, [_TILE_DEPTH, TILE_ROWS]),
        TensorDescriptor.from_tensor(hidden_RD, [_TILE_DEPTH, TILE_COLUMNS]),
        block.columns,
        sums_VD,
        None if exact is None else exact.slots_V,
        None if exact is None else exact.sums_FD,
        *_place(block),
        block.width,
        len(hidden_RD),
        hidden_size,
        PROGRAMS=programs,
        ROWS=TILE_ROWS,
        COLUMNS=TILE_COLUMNS,
        DEPTH=_TILE_DEPTH,
        num_warps=8,
        num_stages=3,
    )


def _place(block: ColumnBlock | None) -> tuple[Tensor | None, int]:
    return (None, 0) if block is None else (block.count, block.first)


def finish_hidden(
    product_SCD: Tensor,
    weight_VD: Tensor,
    targets_C: Tensor,
    factors: RowFactors,
    scale: float,
    out_CD: Tensor,
    dropped: tuple[Tensor, Tensor] | None = None,
) -> None:
    """out = scale * (r * product - t * W[target]), where the product is a sum of S parts; to which the outer product of
    ``dropped`` (C,), (D,) is added."""
    parts, rows, hidden_size = product_SCD.shape
    block = min(triton.next_power_of_2(hidden_size), 1024)
    _finish_hidden[(rows, triton.cdiv(hidden_size, block))](
        product_SCD,
        weight_VD,
        weight_VD.stride(0),
        targets_C,
        factors.row_N,
        factors.target_N,
        out_CD,
        *(dropped or (None, None)),
        hidden_size,
        scale,
        PARTS=parts,
        BLOCK=block,
    )


def add_columns(
    numerators_CV: Tensor,
    row_factors_C: Tensor,
    sums_V: Tensor,
    largest_V: Tensor | None = None,
    block: ColumnBlock | None = None,
) -> None:
    """sums += r @ numerators, float32; and the largest of r * numerators so far. With a block, only its columns."""
    rows, width = numerators_CV.shape
    _add_columns[(triton.cdiv(width, 128),)](
        numerators_CV,
        numerators_CV.stride(0),
        row_factors_C,
        sums_V,
        largest_V,
        None if block is None else block.columns,
        *_place(block),
        rows,
        width,
        ROWS=16,
        COLUMNS=128,
    )


def subtract_targets(
    hidden_ND: Tensor,
    targets_N: Tensor,
    factors: RowFactors,
    scale: float,
    weight_sums_VD: Tensor | None,
    bias_sums_V: Tensor | None,
    exact: ExactRows | None,
) -> None:
    """dW[y] -= scale * sum(t * h) and db[y] -= sum(t) over the tokens with target y: each sum in float32 and in the
    tokens' order, so that it is the same in every run. Where ``exact`` has a slot for the row, its sum takes the place
    of dW's."""
    tokens, hidden_size = hidden_ND.shape
    sorted_targets_N, order_N = torch.sort(targets_N.int(), stable=True)
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


def scale_(tensor: Tensor, factor: Tensor) -> None:
    """Multiply a contiguous tensor by a scalar on the device, in place."""
    block = 4096
    programs = min(triton.cdiv(tensor.numel(), block), 16 * multiprocessors(tensor.device))
    _scale[(programs,)](tensor, factor, tensor.numel(), BLOCK=block)


def multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4  # Triton's interpreter


@triton.jit
def _capped(x, cap, HAS_SOFTCAP: tl.constexpr):
    """Logits in units of log 2 from ``inner * products + bias_factor * bias``."""
    if HAS_SOFTCAP:
        x = cap * tanh(x)
    return x


@triton.jit
def _cap_derivative(x, cap):
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
def _halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right columns of a tile that is to be stored: the whole would not fit into shared memory beside
    the tiles that are being loaded."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _width(count, first_place, width):
    """Of a block of columns; of all without a count."""
    if count is not None:
        width = tl.minimum(tl.maximum(tl.load(count) - first_place, 0), width)
    return width


@triton.jit(do_not_specialize=["rows", "first_place"])
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
    stored_sums,
    count,
    first_place,
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
    vocabulary = _width(count, first_place, vocabulary)
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
        column = tl.arange(0, COLUMNS)  # within the tile, as are targets and the vocabulary's end
        end = vocabulary - first_column
        target = tl.load(targets + row, mask=row < rows, other=-1).to(tl.int32) - first_column
        shift = tl.load(shifts + row, mask=row < rows, other=0.0)
        x = products * inner
        if bias is not None:
            b = tl.load(bias + first_column + column, mask=column < end, other=0.0).to(tl.float32)
            x += (bias_factor * b)[None, :]
            x = tl.maximum(x, NEVER, tl.PropagateNan.ALL)  # a masked vocabulary entry has the bias -inf
        x = _capped(x, cap, HAS_SOFTCAP)
        holds_target = tl.max(((target >= 0) & (target < COLUMNS)).to(tl.int32), 0) > 0
        if holds_target or end < COLUMNS:
            x = tl.where((column[None, :] < end) & (column[None, :] != target[:, None]), x, NEVER)

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
                numerators *= _cap_derivative(x, cap)
            if stored_sums is not None:
                tl.store(stored_sums + place, tl.sum(numerators, 1), mask=row < rows)
            left, right = _halves(numerators, ROWS, COLUMNS)
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
        target_factor *= _cap_derivative(logit, cap)
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


@triton.jit(do_not_specialize=["first_place", "rows"])
def _add_mass(
    parts,
    maxima,
    estimates,
    shifts,
    row_factors,
    mass,
    count,
    first_place,
    width,
    rows,
    sign,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    tiles = tl.cdiv(_width(count, first_place, width), COLUMNS)
    estimate = tl.load(estimates + row, mask=inside, other=0.0)
    shift = tl.load(shifts + row, mask=inside, other=0.0)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        mask = (tile < tiles)[:, None] & inside[None, :]
        place = tile[:, None] * rows + row[None, :]
        maximum = tl.load(maxima + place, mask=mask, other=NEVER)
        own = tl.where(maximum - estimate[None, :] > MAX_EXCESS, maximum, estimate[None, :])
        total += tl.sum(tl.load(parts + place, mask=mask, other=0.0) * tl.exp2(own - shift[None, :]), 0)
    factor = tl.load(row_factors + row, mask=inside, other=0.0)
    tl.store(mass + row, tl.load(mass + row, mask=inside, other=0.0) + sign * factor * total, mask=inside)


@triton.jit(do_not_specialize=["first_place"])
def _gather(
    weight,
    weight_stride,
    bias,
    columns,
    out,
    bias_out,
    count,
    first_place,
    width,
    hidden_size,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    width = _width(count, first_place, width)
    for place in range(tl.program_id(0).to(tl.int64), tl.cdiv(width, COLUMNS) * COLUMNS, tl.num_programs(0)):
        column = tl.load(columns + first_place + tl.minimum(place, width - 1)).to(tl.int64)
        for start in range(0, hidden_size, BLOCK):
            d = start + tl.arange(0, BLOCK)
            values = tl.load(weight + column * weight_stride + d, mask=d < hidden_size)
            tl.store(out + place * hidden_size + d, values, mask=d < hidden_size)
        if bias is not None:
            tl.store(bias_out + place, tl.load(bias + column))


@triton.jit(do_not_specialize=["first_place", "rows"])
def _multiply_kept(
    numerator_tiles,
    weight_tiles,
    out,
    count,
    first_place,
    width,
    rows,
    hidden_size,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Each part sums over its share of the block's columns."""
    steps = tl.cdiv(_width(count, first_place, width), DEPTH)
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
            left, right = _halves(product, ROWS, COLUMNS)
            _put(left, out_rows, first_column, row < rows, hidden_size, ADD)
            _put(right, out_rows, first_column + COLUMNS // 2, row < rows, hidden_size, ADD)


@triton.jit
def _put(values, rows, first_column, inside, width, ADD: tl.constexpr):
    """Write, or add, a tile to rows of a matrix: some columns of those that are inside."""
    column = first_column + tl.arange(0, values.shape[1])
    place = rows[:, None] + column[None, :]
    mask = inside[:, None] & (column < width)[None, :]
    if ADD:
        values += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, values.to(rows.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first_place", "rows"])
def _add_kept_rows(
    numerator_tiles,
    hidden_tiles,
    columns,
    sums,
    exact_slots,
    exact_sums,
    count,
    first_place,
    width,
    rows,
    hidden_size,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    width = _width(count, first_place, width)
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
        vocabulary_row = tl.load(columns + first_place + kept, mask=inside, other=0)
        sum_rows = sums + vocabulary_row.to(tl.int64) * hidden_size
        left, right = _halves(product, ROWS, COLUMNS)
        if exact_slots is not None:
            slot = tl.load(exact_slots + vocabulary_row, mask=inside, other=-1)
            if tl.max(slot, 0) >= 0:
                exact_rows = exact_sums + slot.to(tl.int64) * hidden_size
                _put(left, exact_rows, first_column, slot >= 0, hidden_size, ADD=True)
                _put(right, exact_rows, first_column + COLUMNS // 2, slot >= 0, hidden_size, ADD=True)
            inside = inside & (slot < 0)
        _put(left, sum_rows, first_column, inside, hidden_size, ADD=True)
        _put(right, sum_rows, first_column + COLUMNS // 2, inside, hidden_size, ADD=True)


@triton.jit
def _finish_hidden(
    product,
    weight,
    weight_stride,
    targets,
    row_factors,
    target_factors,
    out,
    dropped,
    tail,
    hidden_size,
    scale,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.maximum(tl.load(targets + row), 0).to(tl.int64)  # an ignored row's factors are zero
    p = tl.load(product + row * hidden_size + d, mask=d < hidden_size, other=0.0)
    for part in tl.static_range(1, PARTS):
        p += tl.load(product + (part * rows + row) * hidden_size + d, mask=d < hidden_size, other=0.0)
    w = tl.load(weight + target * weight_stride + d, mask=d < hidden_size, other=0.0).to(tl.float32)
    gradient = tl.load(row_factors + row) * p - tl.load(target_factors + row) * w
    if dropped is not None:
        gradient += tl.load(dropped + row) * tl.load(tail + d, mask=d < hidden_size, other=0.0)
    tl.store(out + row * hidden_size + d, (scale * gradient).to(out.dtype.element_ty), mask=d < hidden_size)


@triton.jit(do_not_specialize=["first_place", "rows"])
def _add_columns(
    numerators,
    stride,
    row_factors,
    sums,
    largest,
    columns,
    count,
    first_place,
    rows,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    width = _width(count, first_place, width)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    if tl.program_id(0) * COLUMNS < width:
        # summed across the tile's rows at the end only: threads would have to meet in every step
        totals = tl.zeros((ROWS, COLUMNS), tl.float32)
        maxima = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, rows, ROWS):
            row = start + tl.arange(0, ROWS)
            mask = (row < rows)[:, None] & inside[None, :]
            values = tl.load(numerators + row[:, None].to(tl.int64) * stride + column[None, :], mask=mask, other=0.0)
            factor = tl.load(row_factors + row, mask=row < rows, other=0.0)
            values = values.to(tl.float32) * factor[:, None]
            totals += values
            if largest is not None:
                maxima = tl.maximum(maxima, values)
        total, maximum = tl.sum(totals, 0), tl.max(maxima, 0)
        if columns is not None:
            column = tl.load(columns + first_place + column, mask=inside, other=0)
        tl.store(sums + column, tl.load(sums + column, mask=inside) + total, mask=inside)
        if largest is not None:
            old = tl.load(largest + column, mask=inside, other=0.0)
            tl.store(largest + column, tl.maximum(maximum, old), mask=inside)


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
