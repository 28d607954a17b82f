# Kernels are typed by Triton's compiler, not by Python's rules.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
"""The two Triton kernels of ``narrow_path``, each a product with numerators that are computed in the same program.

C rows of a chunk, D hidden, N tokens, S parts, V vocabulary. Logits are in units of log 2.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..kernel_path import Inputs
from ..logits.rows_triton import NEVER
from ..options import LossOptions
from .hopper_kernels import (
    MAX_EXCESS,
    HopperKernels,
    cap_derivative,
    head_of,
    in_tiles,
    logits_of_products,
    slots_and_sums,
)
from .hopper_rows import PART_ROWS, ExactRows, PartialSums

# Tiles of both kernels, of tokens and entries: two programs of four warps share a multiprocessor.
ROWS, COLUMNS = tl.constexpr(PART_ROWS), tl.constexpr(128)
TOKENS, ENTRIES = tl.constexpr(128), tl.constexpr(64)


class NarrowKernels(HopperKernels):
    """Launches the two kernels, and those of ``hopper_path`` that surround them."""

    def multiply_numerators(
        self,
        inputs: Inputs,
        shift_C: Tensor,
        product_SCD: Tensor | None,
        partial: PartialSums | None,
        parts: int,
        options: LossOptions,
    ) -> None:
        """Write each part's product of the numerators, zero at the target, with the weight; and, with ``partial``, its
        sums (S, C): the shift is an estimate then."""
        hidden_CD, weight_VD, bias_V, targets_C = inputs
        (rows, hidden_size), depth = hidden_CD.shape, _depth(hidden_CD)
        h, w = in_tiles(hidden_CD, ROWS.value, depth), in_tiles(weight_VD, COLUMNS.value, depth)
        sums = (None,) * 3 if partial is None else partial.written(options.statistics)
        _multiply_numerators[(triton.cdiv(rows, ROWS.value), parts)](
            *(h, w, product_SCD, head_of(bias_V, options), targets_C, shift_C, sums),
            *(rows, len(weight_VD), hidden_size),
            **{"DEPTH": depth, "num_warps": 4, "num_stages": 3},
        )

    def multiply_hidden(
        self,
        inputs: Inputs,
        shift_N: Tensor,
        row_factors_N: Tensor,
        options: LossOptions,
        out_VD: Tensor | None,
        bias_out_V: Tensor | None,
        exact: ExactRows | None,
    ) -> None:
        """Write ``scale * (r * numerators).T @ hidden``, and ``r @ numerators`` for the bias; numerators are zero at
        targets. Where ``exact`` has a slot for a row of the weight, write its sum there too, in float32."""
        hidden_ND, weight_VD, bias_V, targets_N = inputs
        (tokens, hidden_size), depth = hidden_ND.shape, _depth(hidden_ND)
        h, w = in_tiles(hidden_ND, TOKENS.value, depth), in_tiles(weight_VD, ENTRIES.value, depth)
        out = None if out_VD is None else in_tiles(out_VD, ENTRIES.value, depth)
        programs = min(2 * self.multiprocessors(hidden_ND.device), triton.cdiv(len(weight_VD), ENTRIES.value))
        _multiply_hidden[(programs,)](
            *(h, w, out, bias_out_V, slots_and_sums(exact), head_of(bias_V, options), targets_N),
            *(shift_N, row_factors_N, options.scale, tokens, len(weight_VD), hidden_size),
            **{"DEPTH": depth, "num_warps": 4, "num_stages": 2},
        )


def _depth(hidden_ND: Tensor) -> int:
    """Return the hidden size as it is loaded: a tile beyond the matrix's end is zero there."""
    return max(triton.next_power_of_2(hidden_ND.shape[1]), 16)


@triton.jit(do_not_specialize=["rows"])
def _multiply_numerators(
    hidden_tiles,
    weight_tiles,
    product,
    head,
    targets,
    estimates,
    sums,
    rows,
    vocabulary,
    hidden_size,
    DEPTH: tl.constexpr,
):
    """Write each part's sums. Where logits exceed the estimate by too much, sums are brought to the largest so far."""
    maxima, totals, dots = sums
    bias, _, _, cap = head
    first_row = tl.program_id(0) * ROWS
    row = first_row + tl.arange(0, ROWS)
    target = tl.load(targets + row, mask=row < rows, other=-1).to(tl.int32)
    estimate = tl.load(estimates + row, mask=row < rows, other=0.0)
    h = hidden_tiles.load([first_row, 0])

    share = tl.cdiv(tl.cdiv(vocabulary, COLUMNS), tl.num_programs(1)) * COLUMNS
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, vocabulary)
    shift = estimate
    maximum = tl.full((ROWS,), NEVER, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    dot = tl.zeros((ROWS,), tl.float32)
    multiplied = tl.zeros((ROWS, DEPTH), tl.float32)
    for start in range(first, last, COLUMNS):
        w = weight_tiles.load([start, 0])
        column = start + tl.arange(0, COLUMNS)
        b = None
        if bias is not None:
            b = tl.load(bias + column, mask=column < last, other=0.0).to(tl.float32)[None, :]
        x = logits_of_products(tl.dot(h, w.T), b, head)
        holds_target = tl.max(((target >= start) & (target < start + COLUMNS)).to(tl.int32), 0) > 0
        if holds_target or start + COLUMNS > last:
            x = tl.where((column < last)[None, :] & (column[None, :] != target[:, None]), x, NEVER)
        if maxima is not None:
            maximum = tl.maximum(maximum, tl.max(x, 1))
            before = shift
            shift = tl.where(maximum - estimate > MAX_EXCESS, maximum, estimate)
            rescale = tl.exp2(before - shift)
            if dots is not None:
                dot = rescale * (dot + (before - shift) * total)
            total *= rescale
            if product is not None:
                multiplied *= rescale[:, None]
        numerators = tl.exp2(x - shift[:, None])
        if maxima is not None:
            total += tl.sum(numerators, 1)
        if dots is not None:
            dot += tl.sum(numerators * (x - shift[:, None]), 1)
        if product is not None:
            if cap is not None:
                numerators *= cap_derivative(x, cap)
            multiplied = tl.dot(numerators.to(w.dtype), w, multiplied)

    place = tl.program_id(1).to(tl.int64) * rows + row
    if maxima is not None:
        tl.store(maxima + place, maximum, mask=row < rows)
        tl.store(totals + place, total, mask=row < rows)
    if dots is not None:
        tl.store(dots + place, dot, mask=row < rows)
    if product is not None:
        d = tl.arange(0, DEPTH)
        mask = (row < rows)[:, None] & (d < hidden_size)[None, :]
        tl.store(product + place[:, None] * hidden_size + d[None, :], multiplied, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _multiply_hidden(
    hidden_tiles,
    weight_tiles,
    out_tiles,
    bias_out,
    exact,
    head,
    targets,
    shifts,
    row_factors,
    scale,
    tokens,
    vocabulary,
    hidden_size,
    DEPTH: tl.constexpr,
):
    bias, _, _, cap = head
    slots, exact_sums = exact
    for first in range(tl.program_id(0) * ENTRIES, vocabulary, tl.num_programs(0) * ENTRIES):
        w = weight_tiles.load([first, 0])
        entry = first + tl.arange(0, ENTRIES)
        b = None
        if bias is not None:
            b = tl.load(bias + entry, mask=entry < vocabulary, other=0.0).to(tl.float32)[:, None]
        total = tl.zeros((ENTRIES,), tl.float32)
        multiplied = tl.zeros((ENTRIES, DEPTH), tl.float32)
        for start in range(0, tokens, TOKENS):
            h = hidden_tiles.load([start, 0])
            row = start + tl.arange(0, TOKENS)
            target = tl.load(targets + row, mask=row < tokens, other=-1).to(tl.int32)
            shift = tl.load(shifts + row, mask=row < tokens, other=0.0)
            factor = tl.load(row_factors + row, mask=row < tokens, other=0.0)
            x = logits_of_products(tl.dot(w, h.T), b, head)
            if tl.max(((target >= first) & (target < first + ENTRIES)).to(tl.int32), 0) > 0:
                x = tl.where(entry[:, None] != target[None, :], x, NEVER)
            numerators = tl.exp2(x - shift[None, :]) * factor[None, :]
            if cap is not None:
                numerators *= cap_derivative(x, cap)
            if bias_out is not None:
                total += tl.sum(numerators, 1)
            if out_tiles is not None:
                multiplied = tl.dot(numerators.to(h.dtype), h, multiplied)
        if bias_out is not None:
            tl.store(bias_out + entry, total, mask=entry < vocabulary)
        if out_tiles is not None:
            multiplied *= scale
            out_tiles.store([first, 0], multiplied.to(out_tiles.dtype))
            if slots is not None:
                slot = tl.load(slots + entry, mask=entry < vocabulary, other=-1)
                if tl.max(slot, 0) >= 0:
                    d = tl.arange(0, DEPTH)
                    place = exact_sums + slot.to(tl.int64)[:, None] * hidden_size + d[None, :]
                    tl.store(place, multiplied, mask=(slot >= 0)[:, None] & (d < hidden_size)[None, :])
