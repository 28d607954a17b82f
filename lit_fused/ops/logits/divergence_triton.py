# Kernels are typed by Triton's compiler, not by Python's rules.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
"""The row work of ``divergence_rows`` as two kernels for a GPU: one program walks one row of student and teacher.

C rows of a chunk, V vocabulary, or a rank's part of it. Offsets are 64-bit: C * V exceeds 2^31 soon.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .divergence_rows import DivergenceRows, Pair, RowSums
from .rows_triton import NEVER, blocks, end_of_vectors, logits_of, operands, write_zeros

_KINDS = {"forward_kl": 0, "reverse_kl": 1, "jsd": 2}


class TritonDivergenceRows(DivergenceRows):
    """The row work on a GPU."""

    def write_sums(self, pair: Pair, sums: RowSums) -> None:
        _sums_of_row[(len(pair.lse_C),)](*_arguments(pair), tuple(sums), **_constants(pair))

    def write_gradient(self, pair: Pair, sums: RowSums, factor_C: Tensor) -> None:
        weights = pair.loss.divergence_weight, pair.loss.cross_entropy_weight or None
        numbers = pair.lse_C, sums.divergence, sums.center, factor_C.contiguous()
        _gradient_of_row[(len(pair.lse_C),)](*_arguments(pair), numbers, weights, **_constants(pair))


def _arguments(pair: Pair) -> tuple[Any, ...]:
    """Return what both kernels take: the two sides with their log-sum-exps, the width, temperature and beta."""
    student, teacher = operands(pair.student), operands(pair.teacher)
    lses = pair.student_lse_C, pair.teacher_lse_C.to(pair.lse_C.dtype)
    width, beta = pair.student.products_CV.shape[1], pair.loss.beta if pair.loss.divergence == "jsd" else 0.5
    of_loss = 1 / pair.loss.temperature, beta
    return *student, teacher[0], teacher[1], teacher[3], lses, width, of_loss


def _constants(pair: Pair) -> dict[str, Any]:
    return {"KIND": _KINDS[pair.loss.divergence]} | blocks(pair.student)


@triton.jit
def _log_probability(logits, coldness, lse):
    """A masked entry has a probability of zero, and counts zero; a NaN stays one."""
    return tl.maximum(logits * coldness - lse, NEVER, tl.PropagateNan.ALL)


@triton.jit
def _expm1_of_small(d):
    """exp(d) - 1 by its series, to float32's rounding where |d| < 0.5."""
    series = 1 / 720 + d * (1 / 5040 + d * (1 / 40320))
    return d * (1 + d * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d * (1 / 120 + d * series)))))


@triton.jit
def _log1p_of_small(u):
    """log(1 + u) = 2 artanh(u / (2 + u)) by its series, to float32's rounding where -0.4 < u < 0.65."""
    s = u / (2 + u)
    t = s * s
    return 2 * s * (1 + t * (1 / 3 + t * (1 / 5 + t * (1 / 7 + t * (1 / 9 + t * (1 / 11))))))


@triton.jit
def _above_mixture(log_p, log_q, p, q, beta):
    """Return log p - log m and log q - log m of the mixture m = (1 - beta) p + beta q.

    A GPU's own logarithm has an absolute error near one, so that where p and q are close it is taken by a series:
    log m - log p = log1p(beta expm1(d)), with d = log q - log p. Where q has the larger share of m, p and q exchange
    their places, as log q - log m, the smaller one, would be a difference.
    """
    teacher_leads = beta > 0.5
    d = tl.where(teacher_leads, log_p - log_q, log_q - log_p)
    close = _log1p_of_small(tl.minimum(beta, 1 - beta) * _expm1_of_small(d))
    log_m = tl.log(tl.maximum((1 - beta) * p + beta * q, 1e-37))  # Of less, p and q are zero.
    is_close = tl.abs(d) < 0.5
    of_p = tl.where(is_close, tl.where(teacher_leads, d, 0.0) - close, log_p - log_m)
    of_q = tl.where(is_close, tl.where(teacher_leads, 0.0, d) - close, log_q - log_m)
    return of_p, of_q


@triton.jit
def _sums_of_row(
    products,
    stride,
    targets,
    head,
    teacher,
    teacher_stride,
    teacher_head,
    lses,
    width,
    of_loss,
    sums,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    divergence_out, center_out, mass_out = sums
    coldness, beta = of_loss
    student_lse, teacher_lse = lses
    row = tl.program_id(0).to(tl.int64)
    if tl.load(targets + row) >= 0:
        lse_p = tl.load(student_lse + row)
        lse_q = tl.load(teacher_lse + row)
        of_q = tl.zeros((BLOCK,), tl.float32)
        of_p = tl.zeros((BLOCK,), tl.float32)
        mass = tl.zeros((BLOCK,), tl.float32)
        end = end_of_vectors(width)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside, stored = columns < width, columns < end
            x = tl.load(products + row * stride + columns, mask=stored, other=0.0)
            y = tl.load(teacher + row * teacher_stride + columns, mask=stored, other=0.0)
            x = logits_of(tl.where(inside, x, 0.0), columns, inside, head)  # A row's padding may be anything.
            y = logits_of(tl.where(inside, y, 0.0), columns, inside, teacher_head)
            log_p = _log_probability(x, coldness, lse_p)
            log_q = _log_probability(y, coldness, lse_q)
            p = tl.where(inside, tl.exp(log_p), 0.0)
            q = tl.where(inside, tl.exp(log_q), 0.0)
            if KIND == 0:
                of_q += q * (log_q - log_p)
            else:
                mass += p
                if KIND == 1:
                    of_p += p * (log_p - log_q)
                else:
                    p_above, q_above = _above_mixture(log_p, log_q, p, q, beta)
                    of_p += p * p_above
                    of_q += q * q_above
        center = tl.sum(of_p, 0)
        divergence = tl.sum(of_q, 0)
        if KIND == 1:
            divergence = center
        if KIND == 2:
            divergence = beta * divergence + (1 - beta) * center
        tl.store(divergence_out + row, divergence)
        tl.store(center_out + row, center)
        tl.store(mass_out + row, tl.sum(mass, 0))


@triton.jit
def _gradient_of_row(
    products,
    stride,
    targets,
    head,
    teacher,
    teacher_stride,
    teacher_head,
    lses,
    width,
    of_loss,
    numbers,
    weights,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    coldness, beta = of_loss
    student_lse, teacher_lse = lses
    lse_in, divergence_out, center_in, factor_in = numbers
    divergence_weight, nll_weight = weights
    _, scale, softcap = head
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    if target < 0:
        write_zeros(products + row * stride, width, BLOCK)
    else:
        lse_p = tl.load(student_lse + row)
        lse_q = tl.load(teacher_lse + row)
        lse = tl.load(lse_in + row)
        center = tl.load(center_in + row)
        factor = tl.load(factor_in + row)
        share = factor * divergence_weight * coldness
        if KIND == 2:
            share *= 1 - beta
        of_nll = factor
        if nll_weight is not None:
            of_nll *= nll_weight
        of_q = tl.zeros((BLOCK,), tl.float32)
        end = end_of_vectors(width)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside, stored = columns < width, columns < end
            own = tl.load(products + row * stride + columns, mask=stored, other=0.0)
            x = logits_of(own, columns, inside, head)
            y = tl.load(teacher + row * teacher_stride + columns, mask=stored, other=0.0)
            y = logits_of(y, columns, inside, teacher_head)
            log_p = _log_probability(x, coldness, lse_p)
            log_q = _log_probability(y, coldness, lse_q)
            p = tl.exp(log_p)
            q = tl.exp(log_q)
            if KIND == 0:
                of_q += tl.where(inside, q * (log_q - log_p), 0.0)  # A row's padding may be anything.
                gradient = share * (p - q)
            else:
                above = log_p - log_q
                if KIND == 2:
                    above = _above_mixture(log_p, log_q, p, q, beta)[0]
                gradient = share * p * (above - center)
            if nll_weight is not None:
                gradient += of_nll * (tl.exp(x - lse) - tl.where(columns == target, 1.0, 0.0))
            if softcap is not None:
                gradient *= 1 - (x / softcap) * (x / softcap)
            gradient = tl.where(inside, gradient * scale, 0.0)
            tl.store(products + row * stride + columns, gradient.to(own.dtype), mask=stored)
        if KIND == 0:
            tl.store(divergence_out + row, tl.sum(of_q, 0))
