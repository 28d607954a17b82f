# Kernels are typed by Triton's compiler, not by Python's rules.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
"""The row work of ``rows_torch`` as one kernel: from the logits of some tokens to losses and, in place, gradients.

One program walks one row twice: the first time it sums exponentials above the largest of the first logits, the second
time it overwrites each product by its gradient. That is three passes over the chunk's memory, whatever the options; a
row whose logits go far beyond the first ones is summed once more. A running maximum, whose growth rescales the sums
(the online softmax, arXiv:1805.02867), takes two exponentials for each logit: 6.4 ms for 4.7 at 32,768 rows of 151,936
bfloat16 products on an H200. Rows whose target is negative are ignored: they read nothing, and their gradient is zero.

C rows of a chunk, V vocabulary, or a rank's part of it. Offsets are 64-bit: C * V exceeds 2^31 soon.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_path import LogitsGradient, RowResults
from ..products import Products
from .rows_of_ranks import PartialRows
from .rows_torch import Chunk, TorchRows

_MAX_BLOCK = 4096
# This number stands for minus infinity; times a probability of zero it is zero.
NEVER = tl.constexpr(-1e30)
LOG2_E = tl.constexpr(math.log2(math.e))
MAX_EXCESS = tl.constexpr(28.0)  # nats: sums of more would lose digits, and far beyond it overflow


class TritonRows(TorchRows):
    """The row work on a GPU."""

    handles_ignored = True

    def forward_rows(
        self, chunk: Chunk, results: RowResults, *, write_gradient: bool, factor_C: Tensor | None = None
    ) -> None:
        loss, lse, nll, entropy, correct, top1 = results
        written = loss, lse, nll, entropy, correct.view(torch.int8), top1
        constants = {"WRITE_GRADIENT": write_gradient} | _constants_of_sums(chunk) | blocks(chunk)
        _forward_row[(len(chunk.targets_C),)](*operands(chunk), written, factor_C, *_loss(chunk), **constants)

    def partial_rows(self, chunk: Chunk, partial: PartialRows) -> None:
        _partial_row[(len(chunk.targets_C),)](
            *operands(chunk), tuple(partial), _loss(chunk)[0], **_constants_of_sums(chunk), **blocks(chunk)
        )

    def backward_rows(self, chunk: Chunk, gradient: LogitsGradient) -> None:
        numbers = tuple(number if number is None else number.contiguous() for number in gradient[:-1])
        width = chunk.products_CV.shape[1]
        _backward_row[(len(chunk.targets_C),)](*operands(chunk), numbers, width, **blocks(chunk))

    def scale_(self, tensor: Tensor, factor: Tensor) -> None:
        scale_unless_one_(tensor, factor)


def scale_unless_one_(tensor: Tensor, factor: Tensor) -> None:
    """Multiply a tensor by a scalar on the device, in place; a factor of one, unknown to the host, costs nothing, and
    zero stays zero."""
    if tensor.is_contiguous():
        block = 4096
        _scale[(min(triton.cdiv(tensor.numel(), block), 4096),)](tensor, factor, tensor.numel(), BLOCK=block)
    else:
        Products().scale_(tensor, factor)


def operands(chunk: Chunk) -> tuple[Any, ...]:
    """Return products, their stride and targets, and what makes logits of products."""
    products_CV, targets_C, bias_V, call = chunk
    # The kernels read and write whole vectors of a row, its padding as well.
    assert not products_CV.numel() or products_CV.stride(0) % 16 == 0
    return products_CV, products_CV.stride(0), targets_C, (bias_V, call.options.scale, call.options.softcap)


def _loss(chunk: Chunk) -> tuple[int, tuple[float, ...]]:
    """Return the columns here; and the entries of all ranks, the label smoothing and the weight of the z-loss."""
    options = chunk.call.options
    return chunk.products_CV.shape[1], (chunk.call.vocabulary, options.label_smoothing, options.z_loss)


def _constants_of_sums(chunk: Chunk) -> dict[str, bool]:
    return {"HAS_SMOOTHING": chunk.call.options.label_smoothing > 0, "STATISTICS": chunk.call.options.statistics}


def blocks(chunk: Chunk) -> dict[str, Any]:
    block = min(triton.next_power_of_2(max(chunk.products_CV.shape[1], 1)), _MAX_BLOCK)
    return {"BLOCK": block, "num_warps": 8 if block == _MAX_BLOCK else 4}


@triton.jit
def tanh(x):
    """Accurate to float32's rounding in absolute terms, and right at both ends, where exp is 0 or infinite."""
    return 1 - 2 / (tl.exp(2 * x) + 1)


@triton.jit
def logits_of(products, columns, inside, head):
    bias, scale, softcap = head
    x = products.to(tl.float32) * scale
    if bias is not None:
        x += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if softcap is not None:
        x = softcap * tanh(x / softcap)
    return tl.maximum(x, NEVER, tl.PropagateNan.ALL)  # a masked vocabulary entry has the bias -inf


@triton.jit
def end_of_vectors(columns):
    """Return the end of a row in whole vectors. Behind a mask that ends anywhere, Triton moves single numbers: the
    forward pass of 8192 rows took 1.08 ms at V = 50257, and 0.75 ms at 50304, on an H200."""
    return tl.cdiv(columns, 16) * 16


@triton.jit
def _write_gradient(row_products, target, numbers, slope, head, vocabulary, BLOCK: tl.constexpr):
    """p (base + slope log p) - uniform, at the target one number more; times the softcap's derivative and the scale.
    ``slope`` is a pointer, or None."""
    _, scale, softcap = head
    lse, base, uniform, of_target = numbers
    end = end_of_vectors(vocabulary)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        products = tl.load(row_products + columns, mask=columns < end, other=0.0)
        x = logits_of(products, columns, inside, head)
        row_factor = base
        if slope is not None:
            row_factor += tl.load(slope) * (x - lse)
        gradient = tl.exp(x - lse) * row_factor - uniform + tl.where(columns == target, of_target, 0.0)
        if softcap is not None:
            gradient *= 1 - (x / softcap) * (x / softcap)
        gradient = tl.where(inside, gradient * scale, 0.0)
        tl.store(row_products + columns, gradient.to(products.dtype), mask=columns < end)


@triton.jit
def write_zeros(row_products, vocabulary, BLOCK: tl.constexpr):
    end = end_of_vectors(vocabulary)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        zeros = tl.zeros((BLOCK,), row_products.dtype.element_ty)
        tl.store(row_products + columns, zeros, mask=columns < end)


@triton.jit
def _sums_above(row_products, shift, target, vocabulary, head, HAS_SMOOTHING, STATISTICS, TOP1, BLOCK: tl.constexpr):
    """Largest logit; sums of e = exp(x - shift), e (x - shift) and x; largest but the target's; first column of all."""
    maximum = tl.full((BLOCK,), NEVER, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    plain = tl.zeros((BLOCK,), tl.float32)
    rival = tl.full((BLOCK,), NEVER, tl.float32)
    place = tl.full((BLOCK,), 0, tl.int32)
    end = end_of_vectors(vocabulary)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        x = logits_of(tl.load(row_products + columns, mask=columns < end, other=0.0), columns, inside, head)
        if HAS_SMOOTHING:
            plain += tl.where(inside, x, 0.0)
        x = tl.where(inside, x, NEVER)
        if TOP1:
            place = tl.where(x > maximum, columns, place)
        maximum = tl.maximum(maximum, x)
        e = tl.exp2((x - shift) * LOG2_E)
        total += e
        if STATISTICS:
            weighted += e * (x - shift)
            rival = tl.maximum(rival, tl.where(columns == target, NEVER, x))
    top = tl.max(maximum, 0)
    first = tl.min(tl.where(maximum == top, place, vocabulary), 0)
    return top, tl.sum(total, 0), tl.sum(weighted, 0), tl.sum(plain, 0), tl.max(rival, 0), first


@triton.jit
def _sums_of_row(row_products, target, vocabulary, head, HAS_SMOOTHING, STATISTICS, TOP1, BLOCK: tl.constexpr):
    """Largest logit m; sums of exp(x - m), exp(x - m) (x - m) and x; largest but the target's; m's first column."""
    columns = tl.arange(0, BLOCK)
    inside = columns < vocabulary
    stored = columns < end_of_vectors(vocabulary)
    x = logits_of(tl.load(row_products + columns, mask=stored, other=0.0), columns, inside, head)
    shift = tl.max(tl.where(inside, x, NEVER), 0)
    top, total, weighted, plain, rival, first = _sums_above(
        row_products, shift, target, vocabulary, head, HAS_SMOOTHING, STATISTICS, TOP1, BLOCK
    )
    if top - shift > MAX_EXCESS:
        shift = top
        _, total, weighted, plain, rival, first = _sums_above(
            row_products, shift, target, vocabulary, head, HAS_SMOOTHING, STATISTICS, TOP1, BLOCK
        )
    rescale = tl.exp2((shift - top) * LOG2_E)
    return top, total * rescale, (weighted + total * (shift - top)) * rescale, plain, rival, first


@triton.jit
def _partial_row(
    products,
    stride,
    targets,
    head,
    partial,
    width,
    HAS_SMOOTHING: tl.constexpr,
    STATISTICS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    maximum_out, total_out, weighted_out, plain_out, target_out, rival_out, place_out = partial
    row = tl.program_id(0).to(tl.int64)
    row_products = products + row * stride
    target = tl.load(targets + row)
    if target >= 0:
        maximum, total, weighted, plain, rival, place = _sums_of_row(
            row_products, target, width, head, HAS_SMOOTHING, STATISTICS, True, BLOCK
        )
        tl.store(place_out + row, place)
        tl.store(maximum_out + row, maximum)
        tl.store(total_out + row, total)
        if HAS_SMOOTHING:
            tl.store(plain_out + row, plain)
        if STATISTICS:
            tl.store(weighted_out + row, weighted)
            tl.store(rival_out + row, rival)
        if target < width:
            tl.store(target_out + row, logits_of(tl.load(row_products + target), target, True, head))


@triton.jit
def _forward_row(
    products,
    stride,
    targets,
    head,
    results,
    factor,
    vocabulary,
    loss,
    HAS_SMOOTHING: tl.constexpr,
    STATISTICS: tl.constexpr,
    WRITE_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    loss_out, lse_out, nll_out, entropy_out, correct_out, top1_out = results
    entries, smoothing, z_loss = loss
    row = tl.program_id(0).to(tl.int64)
    row_products = products + row * stride
    target = tl.load(targets + row)
    if target < 0:
        if WRITE_GRADIENT:
            write_zeros(row_products, vocabulary, BLOCK)
    else:
        top, normalizer, weighted, plain, rival, place = _sums_of_row(
            row_products, target, vocabulary, head, HAS_SMOOTHING, STATISTICS, top1_out is not None, BLOCK
        )
        if top1_out is not None:
            tl.store(top1_out + row, place)
        lse = top + tl.log(normalizer)
        logit = logits_of(tl.load(row_products + target), target, True, head)
        nll = lse - logit
        smooth = nll
        if HAS_SMOOTHING:
            smooth = (1 - smoothing) * nll + smoothing * (lse - plain / entries)
        tl.store(loss_out + row, smooth + z_loss * lse * lse)
        tl.store(lse_out + row, lse)
        tl.store(nll_out + row, nll)
        if STATISTICS:
            # It is that of the rounded log-sum-exp, which the gradient's logarithms are taken from as well.
            tl.store(entropy_out + row, lse - top - weighted / normalizer)
            tl.store(correct_out + row, (logit > rival).to(tl.int8))
        if WRITE_GRADIENT:
            f = 1.0
            if factor is not None:
                f = tl.load(factor + row)
            numbers = (lse, f * (1 + 2 * z_loss * lse), f * smoothing / entries, f * (smoothing - 1))
            _write_gradient(row_products, target, numbers, None, head, vocabulary, BLOCK)


@triton.jit
def _backward_row(products, stride, targets, head, gradient, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_products = products + row * stride
    target = tl.load(targets + row)
    if target < 0:
        write_zeros(row_products, vocabulary, BLOCK)
    else:
        lse, bases, slopes, uniforms, of_target = gradient
        base = 1.0
        uniform = 0.0
        slope = slopes
        if bases is not None:
            base = tl.load(bases + row)
        if uniforms is not None:
            uniform = tl.load(uniforms + row)
        if slopes is not None:
            slope = slopes + row
        numbers = (tl.load(lse + row), base, uniform, tl.load(of_target + row))
        _write_gradient(row_products, target, numbers, slope, head, vocabulary, BLOCK)


@triton.jit
def _scale(tensor, factor, count, BLOCK: tl.constexpr):
    f = tl.load(factor).to(tl.float32)
    if f != 1.0:
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
            place = start + tl.arange(0, BLOCK)
            values = tl.load(tensor + place, mask=place < count, other=0.0)
            scaled = (values.to(tl.float32) * f).to(values.dtype)
            tl.store(tensor + place, tl.where(values == 0, values, scaled), mask=place < count)
