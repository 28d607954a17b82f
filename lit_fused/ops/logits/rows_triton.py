# Kernels are typed by Triton's compiler, not by Python's rules.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""The row work of ``rows_torch`` as one kernel: from the logits of some tokens to losses and, in place, gradients.

One program walks one row twice: the first time it keeps a running maximum and rescales its running sums whenever the
maximum grows (the online softmax, arXiv:1805.02867), the second time it overwrites each product by its gradient. That
is three passes over the chunk's memory, whatever the options. Rows whose target is negative are ignored: they read
nothing, and their gradient is zero.

C rows of a chunk, V vocabulary, or a rank's part of it. Offsets are 64-bit: C * V exceeds 2^31 soon.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_fused.ops.kernel_path import HeadCall, RowResults
from lit_fused.ops.logits.rows_of_ranks import PartialRows
from lit_fused.ops.products import Products

_MAX_BLOCK = 4096
# This number stands for minus infinity; times a probability of zero it is zero.
NEVER = tl.constexpr(-1e30)


class TritonRows(Products):
    """The row work of :class:`~lit_fused.ops.logits.logits_path.RowKernels` on a GPU."""

    handles_ignored = True

    def forward_rows(
        self,
        products_CV: Tensor,
        targets_C: Tensor,
        bias_V: Tensor | None,
        call: HeadCall,
        results: RowResults,
        *,
        write_gradient: bool,
        factor: Tensor | None = None,
    ) -> None:
        options = call.options
        rows, vocabulary = products_CV.shape
        _forward_row[(rows,)](
            products_CV,
            products_CV.stride(0),
            targets_C,
            bias_V,
            results.loss,
            results.lse,
            results.nll,
            results.entropy,
            results.correct.view(torch.int8),
            factor,
            vocabulary,
            call.vocabulary,
            options.scale,
            options.softcap or 0.0,
            options.label_smoothing,
            options.z_loss,
            HAS_SOFTCAP=options.softcap is not None,
            HAS_SMOOTHING=options.label_smoothing > 0,
            STATISTICS=options.statistics,
            WRITE_GRADIENT=write_gradient,
            **_blocks(vocabulary),
        )

    def partial_rows(
        self, products_CV: Tensor, targets_C: Tensor, bias_V: Tensor | None, call: HeadCall, partial: PartialRows
    ) -> None:
        options = call.options
        rows, width = products_CV.shape
        _partial_row[(rows,)](
            products_CV,
            products_CV.stride(0),
            targets_C,
            bias_V,
            *partial,
            width,
            options.scale,
            options.softcap or 0.0,
            HAS_SOFTCAP=options.softcap is not None,
            HAS_SMOOTHING=options.label_smoothing > 0,
            STATISTICS=options.statistics,
            **_blocks(width),
        )

    def backward_rows(
        self,
        products_CV: Tensor,
        targets_C: Tensor,
        bias_V: Tensor | None,
        lse_C: Tensor,
        factor_C: Tensor | None,
        call: HeadCall,
    ) -> None:
        options = call.options
        rows, vocabulary = products_CV.shape
        _backward_row[(rows,)](
            products_CV,
            products_CV.stride(0),
            targets_C,
            bias_V,
            lse_C,
            factor_C,
            vocabulary,
            call.vocabulary,
            options.scale,
            options.softcap or 0.0,
            options.label_smoothing,
            options.z_loss,
            HAS_SOFTCAP=options.softcap is not None,
            **_blocks(vocabulary),
        )


def _blocks(vocabulary: int) -> dict[str, int]:
    block = min(triton.next_power_of_2(max(vocabulary, 1)), _MAX_BLOCK)
    return {"BLOCK": block, "num_warps": 8 if block == _MAX_BLOCK else 4}


@triton.jit
def tanh(x):
    """Accurate to float32's rounding in absolute terms, and right at both ends, where exp is 0 or infinite."""
    return 1 - 2 / (tl.exp(2 * x) + 1)


@triton.jit
def _logits(products, columns, inside, bias, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    x = products.to(tl.float32) * scale
    if bias is not None:
        x += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_SOFTCAP:
        x = softcap * tanh(x / softcap)
    return tl.maximum(x, NEVER, tl.PropagateNan.ALL)  # a masked vocabulary entry has the bias -inf


@triton.jit
def _write_gradient(
    row_products,
    target,
    bias,
    lse,
    factor,
    vocabulary,
    entries,
    scale,
    softcap,
    label_smoothing,
    z_loss,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """p (1 + 2 z lse) - e / V - (1 - e) [v = target], times the softcap's derivative, the scale and the factor."""
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        products = tl.load(row_products + columns, mask=inside, other=0.0)
        x = _logits(products, columns, inside, bias, scale, softcap, HAS_SOFTCAP)
        gradient = tl.exp(x - lse) * (1 + 2 * z_loss * lse) - label_smoothing / entries
        gradient -= tl.where(columns == target, 1 - label_smoothing, 0.0)
        if HAS_SOFTCAP:
            gradient *= 1 - (x / softcap) * (x / softcap)
        tl.store(row_products + columns, (gradient * (scale * factor)).to(products.dtype), mask=inside)


@triton.jit
def _write_zeros(row_products, vocabulary, BLOCK: tl.constexpr):
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        zeros = tl.zeros((BLOCK,), row_products.dtype.element_ty)
        tl.store(row_products + columns, zeros, mask=columns < vocabulary)


@triton.jit
def _sums_of_row(
    row_products,
    target,
    bias,
    vocabulary,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    STATISTICS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest logit m; the sums of exp(x - m), exp(x - m) x and x over the row; the largest but the target's."""
    maximum = tl.full((BLOCK,), NEVER, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)  # of exp(x - maximum)
    weighted = tl.zeros((BLOCK,), tl.float32)  # of exp(x - maximum) * x
    plain = tl.zeros((BLOCK,), tl.float32)  # of x
    rival = tl.full((BLOCK,), NEVER, tl.float32)  # the largest logit but the target's
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        x = tl.load(row_products + columns, mask=inside, other=0.0)
        x = _logits(x, columns, inside, bias, scale, softcap, HAS_SOFTCAP)
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
    return (
        top,
        tl.sum(total * rescale, 0),
        tl.sum(weighted * rescale, 0),
        tl.sum(plain, 0),
        tl.max(rival, 0),
    )


@triton.jit
def _partial_row(
    products,
    stride,
    targets,
    bias,
    maximum_out,
    total_out,
    weighted_out,
    plain_out,
    target_out,
    rival_out,
    width,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    STATISTICS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_products = products + row * stride
    target = tl.load(targets + row)
    if target >= 0:
        maximum, total, weighted, plain, rival = _sums_of_row(
            row_products, target, bias, width, scale, softcap, HAS_SOFTCAP, HAS_SMOOTHING, STATISTICS, BLOCK
        )
        tl.store(maximum_out + row, maximum)
        tl.store(total_out + row, total)
        if HAS_SMOOTHING:
            tl.store(plain_out + row, plain)
        if STATISTICS:
            tl.store(weighted_out + row, weighted)
            tl.store(rival_out + row, rival)
        if target < width:
            x = tl.load(row_products + target)
            tl.store(target_out + row, _logits(x, target, True, bias, scale, softcap, HAS_SOFTCAP))


@triton.jit
def _forward_row(
    products,
    stride,
    targets,
    bias,
    loss_out,
    lse_out,
    nll_out,
    entropy_out,
    correct_out,
    factor,
    vocabulary,
    entries,
    scale,
    softcap,
    label_smoothing,
    z_loss,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    STATISTICS: tl.constexpr,
    WRITE_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_products = products + row * stride
    target = tl.load(targets + row)
    if target < 0:
        if WRITE_GRADIENT:
            _write_zeros(row_products, vocabulary, BLOCK)
    else:
        top, normalizer, weighted, plain, rival = _sums_of_row(
            row_products, target, bias, vocabulary, scale, softcap, HAS_SOFTCAP, HAS_SMOOTHING, STATISTICS, BLOCK
        )
        lse = top + tl.log(normalizer)
        logit = _logits(tl.load(row_products + target), target, True, bias, scale, softcap, HAS_SOFTCAP)
        nll = lse - logit
        loss = nll
        if HAS_SMOOTHING:
            loss = (1 - label_smoothing) * nll + label_smoothing * (lse - plain / entries)
        tl.store(loss_out + row, loss + z_loss * lse * lse)
        tl.store(lse_out + row, lse)
        tl.store(nll_out + row, nll)
        if STATISTICS:
            tl.store(entropy_out + row, lse - weighted / normalizer)
            tl.store(correct_out + row, (logit > rival).to(tl.int8))
        if WRITE_GRADIENT:
            f = 1.0
            if factor is not None:
                f = tl.load(factor)
            _write_gradient(
                row_products,
                target,
                bias,
                lse,
                f,
                vocabulary,
                entries,
                scale,
                softcap,
                label_smoothing,
                z_loss,
                HAS_SOFTCAP,
                BLOCK,
            )


@triton.jit
def _backward_row(
    products,
    stride,
    targets,
    bias,
    lse,
    factors,
    vocabulary,
    entries,
    scale,
    softcap,
    label_smoothing,
    z_loss,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_products = products + row * stride
    target = tl.load(targets + row)
    if target < 0:
        _write_zeros(row_products, vocabulary, BLOCK)
    else:
        factor = 1.0
        if factors is not None:
            factor = tl.load(factors + row)
        _write_gradient(
            row_products,
            target,
            bias,
            tl.load(lse + row),
            factor,
            vocabulary,
            entries,
            scale,
            softcap,
            label_smoothing,
            z_loss,
            HAS_SOFTCAP,
            BLOCK,
        )
