# Kernels are typed by Triton's compiler, not by Python's rules.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
"""The row work of ``rows_torch`` as one kernel: from the logits of some tokens to losses and, in place, gradients.

One program walks one row twice: the first time it keeps a running maximum and rescales its running sums whenever the
maximum grows (the online softmax, arXiv:1805.02867), the second time it overwrites each product by its gradient. That
is three passes over the chunk's memory, whatever the options. Rows whose target is negative are ignored: they read
nothing, and their gradient is zero.

C rows of a chunk, V vocabulary, or a rank's part of it. Offsets are 64-bit: C * V exceeds 2^31 soon.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_fused.ops.kernel_path import RowResults
from lit_fused.ops.logits.rows_of_ranks import PartialRows
from lit_fused.ops.logits.rows_torch import Chunk, TorchRows

_MAX_BLOCK = 4096
# This number stands for minus infinity; times a probability of zero it is zero.
NEVER = tl.constexpr(-1e30)


class TritonRows(TorchRows):
    """The row work on a GPU."""

    handles_ignored = True

    def forward_rows(
        self, chunk: Chunk, results: RowResults, *, write_gradient: bool, factor: Tensor | None = None
    ) -> None:
        *numbers, correct = results
        constants = {"WRITE_GRADIENT": write_gradient} | _constants_of_sums(chunk) | _blocks(chunk)
        _forward_row[(len(chunk.targets_C),)](
            *_operands(chunk), (*numbers, correct.view(torch.int8)), factor, *_loss(chunk), **constants
        )

    def partial_rows(self, chunk: Chunk, partial: PartialRows) -> None:
        _partial_row[(len(chunk.targets_C),)](
            *_operands(chunk), tuple(partial), _loss(chunk)[0], **_constants_of_sums(chunk), **_blocks(chunk)
        )

    def backward_rows(self, chunk: Chunk, lse_C: Tensor, factor_C: Tensor | None) -> None:
        _backward_row[(len(chunk.targets_C),)](*_operands(chunk), lse_C, factor_C, *_loss(chunk), **_blocks(chunk))


def print_labels_out_of_range(labels_N: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Print the smallest and the largest label, from the device, if they do not lie in [0, vocabulary): the host does
    not wait for the device, and so cannot."""
    _print_labels_out_of_range[(1,)](labels_N, labels_N.numel(), vocabulary, ignore_index, BLOCK=4096)


def _operands(chunk: Chunk) -> tuple[Any, ...]:
    """Return products, their stride and targets, and what makes logits of products."""
    products_CV, targets_C, bias_V, call = chunk
    return products_CV, products_CV.stride(0), targets_C, (bias_V, call.options.scale, call.options.softcap)


def _loss(chunk: Chunk) -> tuple[int, tuple[float, ...]]:
    """Return the columns here; and the entries of all ranks, the label smoothing and the weight of the z-loss."""
    options = chunk.call.options
    return chunk.products_CV.shape[1], (chunk.call.vocabulary, options.label_smoothing, options.z_loss)


def _constants_of_sums(chunk: Chunk) -> dict[str, bool]:
    return {"HAS_SMOOTHING": chunk.call.options.label_smoothing > 0, "STATISTICS": chunk.call.options.statistics}


def _blocks(chunk: Chunk) -> dict[str, Any]:
    block = min(triton.next_power_of_2(max(chunk.products_CV.shape[1], 1)), _MAX_BLOCK)
    return {"BLOCK": block, "num_warps": 8 if block == _MAX_BLOCK else 4}


@triton.jit
def tanh(x):
    """Accurate to float32's rounding in absolute terms, and right at both ends, where exp is 0 or infinite."""
    return 1 - 2 / (tl.exp(2 * x) + 1)


@triton.jit
def _logits(products, columns, inside, head):
    bias, scale, softcap = head
    x = products.to(tl.float32) * scale
    if bias is not None:
        x += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if softcap is not None:
        x = softcap * tanh(x / softcap)
    return tl.maximum(x, NEVER, tl.PropagateNan.ALL)  # a masked vocabulary entry has the bias -inf


@triton.jit
def _write_gradient(row_products, target, lse, factor, head, vocabulary, loss, BLOCK: tl.constexpr):
    """p (1 + 2 z lse) - e / V - (1 - e) [v = target], times the softcap's derivative, the scale and the factor."""
    _, scale, softcap = head
    entries, smoothing, z_loss = loss
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        products = tl.load(row_products + columns, mask=inside, other=0.0)
        x = _logits(products, columns, inside, head)
        gradient = tl.exp(x - lse) * (1 + 2 * z_loss * lse) - smoothing / entries
        gradient -= tl.where(columns == target, 1 - smoothing, 0.0)
        if softcap is not None:
            gradient *= 1 - (x / softcap) * (x / softcap)
        tl.store(row_products + columns, (gradient * (scale * factor)).to(products.dtype), mask=inside)


@triton.jit
def _write_zeros(row_products, vocabulary, BLOCK: tl.constexpr):
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        zeros = tl.zeros((BLOCK,), row_products.dtype.element_ty)
        tl.store(row_products + columns, zeros, mask=columns < vocabulary)


@triton.jit
def _sums_of_row(row_products, target, vocabulary, head, HAS_SMOOTHING, STATISTICS, BLOCK: tl.constexpr):
    """The largest logit m; the sums of exp(x - m), exp(x - m) x and x over the row; the largest but the target's."""
    maximum = tl.full((BLOCK,), NEVER, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)  # of exp(x - maximum)
    weighted = tl.zeros((BLOCK,), tl.float32)  # of exp(x - maximum) * x
    plain = tl.zeros((BLOCK,), tl.float32)  # of x
    rival = tl.full((BLOCK,), NEVER, tl.float32)  # the largest logit but the target's
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        x = _logits(tl.load(row_products + columns, mask=inside, other=0.0), columns, inside, head)
        if HAS_SMOOTHING:
            plain += tl.where(inside, x, 0.0)
        x = tl.where(inside, x, NEVER)
        larger = tl.maximum(maximum, x)
        shrink = tl.exp(maximum - larger)
        e = tl.exp(x - larger)
        total = total * shrink + e
        if STATISTICS:
            weighted = weighted * shrink + e * x
            rival = tl.maximum(rival, tl.where(columns == target, NEVER, x))
        maximum = larger
    top = tl.max(maximum, 0)
    rescale = tl.exp(maximum - top)
    return top, tl.sum(total * rescale, 0), tl.sum(weighted * rescale, 0), tl.sum(plain, 0), tl.max(rival, 0)


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
    maximum_out, total_out, weighted_out, plain_out, target_out, rival_out = partial
    row = tl.program_id(0).to(tl.int64)
    row_products = products + row * stride
    target = tl.load(targets + row)
    if target >= 0:
        maximum, total, weighted, plain, rival = _sums_of_row(
            row_products, target, width, head, HAS_SMOOTHING, STATISTICS, BLOCK
        )
        tl.store(maximum_out + row, maximum)
        tl.store(total_out + row, total)
        if HAS_SMOOTHING:
            tl.store(plain_out + row, plain)
        if STATISTICS:
            tl.store(weighted_out + row, weighted)
            tl.store(rival_out + row, rival)
        if target < width:
            tl.store(target_out + row, _logits(tl.load(row_products + target), target, True, head))


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
    loss_out, lse_out, nll_out, entropy_out, correct_out = results
    entries, smoothing, z_loss = loss
    row = tl.program_id(0).to(tl.int64)
    row_products = products + row * stride
    target = tl.load(targets + row)
    if target < 0:
        if WRITE_GRADIENT:
            _write_zeros(row_products, vocabulary, BLOCK)
    else:
        top, normalizer, weighted, plain, rival = _sums_of_row(
            row_products, target, vocabulary, head, HAS_SMOOTHING, STATISTICS, BLOCK
        )
        lse = top + tl.log(normalizer)
        logit = _logits(tl.load(row_products + target), target, True, head)
        nll = lse - logit
        smooth = nll
        if HAS_SMOOTHING:
            smooth = (1 - smoothing) * nll + smoothing * (lse - plain / entries)
        tl.store(loss_out + row, smooth + z_loss * lse * lse)
        tl.store(lse_out + row, lse)
        tl.store(nll_out + row, nll)
        if STATISTICS:
            tl.store(entropy_out + row, lse - weighted / normalizer)
            tl.store(correct_out + row, (logit > rival).to(tl.int8))
        if WRITE_GRADIENT:
            f = 1.0
            if factor is not None:
                f = tl.load(factor)
            _write_gradient(row_products, target, lse, f, head, vocabulary, loss, BLOCK)


@triton.jit
def _backward_row(products, stride, targets, head, lse, factors, vocabulary, loss, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_products = products + row * stride
    target = tl.load(targets + row)
    if target < 0:
        _write_zeros(row_products, vocabulary, BLOCK)
    else:
        factor = 1.0
        if factors is not None:
            factor = tl.load(factors + row)
        _write_gradient(row_products, target, tl.load(lse + row), factor, head, vocabulary, loss, BLOCK)


@triton.jit(do_not_specialize=["count", "vocabulary", "ignore_index"])
def _print_labels_out_of_range(labels, count, vocabulary, ignore_index, BLOCK: tl.constexpr):
    smallest = tl.zeros((BLOCK,), tl.int64)
    largest = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        label = tl.load(labels + place, mask=place < count, other=0).to(tl.int64)
        label = tl.where(label == ignore_index, 0, label)
        smallest = tl.minimum(smallest, label)
        largest = tl.maximum(largest, label)
    low = tl.min(smallest, 0)
    high = tl.max(largest, 0)
    if (low < 0) | (high >= vocabulary):
        tl.device_print("smallest and largest label:", low, high)
