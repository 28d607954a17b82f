"""Chunk by chunk: a matrix product for the logits, then row work, then two products for the gradients.

The row work (``rows_triton`` on a GPU, ``rows_torch`` elsewhere) turns the logits of a chunk into losses and then, in
the same memory, into their own gradient. Any dtype, any option, any device.

Where the vocabulary is divided over ranks, the row work has two parts, between which ranks exchange a few numbers per
row (``vocabulary``): each rank's partial sums, then, from the combined log-sum-exp, the gradient of its own logits. The
gradient of the hidden states is a sum over the ranks; each chunk's is summed while the next one is computed.

C chunk, N tokens, D hidden, V vocabulary.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from lit_fused.ops.linear_cross_entropy import rows_torch
from lit_fused.ops.linear_cross_entropy.building import kernels_can_be_built
from lit_fused.ops.linear_cross_entropy.plan import (
    Gradients,
    Plan,
    RowOptions,
    RowResults,
    VocabularyShard,
    chunk_rows,
    chunks,
)
from lit_fused.ops.linear_cross_entropy.products import multiply, multiply_add
from lit_fused.ops.linear_cross_entropy.vocabulary import PartialRows, combine

try:
    from lit_fused.ops.linear_cross_entropy import rows_triton
except ImportError:  # Triton exists for Linux only
    rows_triton = None


def applies_factor(plan: Plan) -> bool:
    """Whether ``forward`` multiplies the gradients by its factor. In float16 the small ones would be lost: there it is
    left to backward."""
    return plan.compute_dtype != torch.float16


def handles_ignored(hidden_ND: Tensor) -> bool:
    """Whether rows whose target is negative may be among the tokens; else they must be dropped before."""
    return _rows(hidden_ND) is not rows_torch


def forward(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    factor: Tensor | None,
    plan: Plan,
) -> tuple[RowResults, Gradients | None]:
    """Results of every row and, if the plan has them made in forward, the gradients of ``(loss * factor).sum()``."""
    results = RowResults.zeros(len(targets_N), plan.result_dtype, hidden_ND.device)
    sums = _GradientSums(hidden_ND, weight_VD, plan) if plan.gradients_in_forward else None
    factor = factor if applies_factor(plan) else None
    for chunk, hidden_CD, logits_CV in _chunks_of_products(hidden_ND, weight_VD, plan):
        work = (logits_CV, targets_N[chunk], bias_V, plan.rows, results[chunk])
        if plan.shard is None:
            _rows(hidden_ND).forward_rows(*work, write_gradient=sums is not None, factor=factor)
        else:
            _forward_sharded_rows(*work, plan.shard, write_gradient=sums is not None, factor=factor)
        if sums is not None:
            sums.add(chunk, hidden_CD, weight_VD, logits_CV)
    return results, None if sums is None else sums.finish()


def backward(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    lse_N: Tensor,
    nll_N: Tensor,
    factor_N: Tensor | None,
    plan: Plan,
) -> Gradients:
    """Gradients of ``(loss_N * factor_N).sum()`` from logits that are computed once more."""
    sums = _GradientSums(hidden_ND, weight_VD, plan)
    if plan.shard is not None:
        targets_N = plan.shard.local(targets_N, len(weight_VD))
    for chunk, hidden_CD, logits_CV in _chunks_of_products(hidden_ND, weight_VD, plan):
        factor_C = None if factor_N is None else factor_N[chunk]
        _rows(hidden_ND).backward_rows(logits_CV, targets_N[chunk], bias_V, lse_N[chunk], factor_C, plan.rows)
        sums.add(chunk, hidden_CD, weight_VD, logits_CV)
    return sums.finish()


def scale_(tensor: Tensor, factor: Tensor) -> Tensor:
    """In place."""
    return tensor.mul_(factor)


def _forward_sharded_rows(
    products_CV: Tensor,
    targets_C: Tensor,
    bias_V: Tensor | None,
    options: RowOptions,
    results: RowResults,
    shard: VocabularyShard,
    *,
    write_gradient: bool,
    factor: Tensor | None,
) -> None:
    """``forward_rows`` for this rank's columns of the products."""
    rows, width = products_CV.shape
    columns_C = shard.local(targets_C, width)
    partial = PartialRows.empty(rows, results.loss.dtype, results.loss.device)
    _rows(products_CV).partial_rows(products_CV, columns_C, bias_V, options, partial)
    combine(partial, targets_C, options, shard, results)
    if write_gradient:
        factor_C = None if factor is None else factor.expand(rows).contiguous()
        _rows(products_CV).backward_rows(products_CV, columns_C, bias_V, results.lse, factor_C, options)


class _GradientSums:
    """Receives each chunk's gradient of the logits and carries it to the hidden states, the weight and the bias."""

    def __init__(self, hidden_ND: Tensor, weight_VD: Tensor, plan: Plan) -> None:
        self.scale = plan.rows.scale
        wants_hidden, wants_weight, wants_bias = plan.wanted
        self.group = None if plan.shard is None else plan.shard.group
        self.exchanges: list[dist.Work] = []
        # summed over ranks in float32: in half precision each rank's part would be rounded once more
        hidden_dtype = hidden_ND.dtype if self.group is None else plan.result_dtype
        self.hidden_ND = torch.empty_like(hidden_ND, dtype=hidden_dtype) if wants_hidden else None
        # The one large thing that forward holds: V x D, in float32 also for half weights. The logits are rounded once
        # already; and sums in float16 could overflow before they are scaled.
        rounded = plan.float32_accumulation is False and plan.compute_dtype == torch.bfloat16
        dtype = plan.compute_dtype if rounded else plan.result_dtype
        self.weight_VD = torch.zeros_like(weight_VD, dtype=dtype) if wants_weight else None
        self.bias_V = weight_VD.new_zeros(len(weight_VD), dtype=plan.result_dtype) if wants_bias else None

    def add(self, chunk: slice, hidden_CD: Tensor, weight_VD: Tensor, dlogits_CV: Tensor) -> None:
        if self.hidden_ND is not None:
            multiply(dlogits_CV, weight_VD, self.hidden_ND[chunk])
            if self.group is not None:
                work = dist.all_reduce(self.hidden_ND[chunk], group=self.group, async_op=True)
                assert work is not None
                self.exchanges.append(work)
        if self.weight_VD is not None:
            multiply_add(dlogits_CV.T, hidden_CD, self.weight_VD)
        if self.bias_V is not None:
            self.bias_V.add_(dlogits_CV.sum(0, dtype=self.bias_V.dtype))

    def finish(self) -> Gradients:
        """The bias is added to scaled products: what reached it is too large by the scale."""
        if self.bias_V is not None:
            self.bias_V.div_(self.scale)
        for exchange in self.exchanges:
            exchange.wait()
        return Gradients(self.hidden_ND, self.weight_VD, self.bias_V)


def _chunks_of_products(hidden_ND: Tensor, weight_VD: Tensor, plan: Plan) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield (slice, hidden (C, D), products (C, V)); the products' memory is the same for every chunk."""
    tokens, vocabulary = len(hidden_ND), len(weight_VD)
    largest = vocabulary if plan.shard is None else plan.shard.largest  # ranks have to make the same chunks
    rows = min(chunk_rows(tokens, largest * hidden_ND.itemsize, plan.budget_mib), tokens)
    buffer_CV = hidden_ND.new_empty(rows, vocabulary)
    for chunk in chunks(tokens, rows):
        hidden_CD = hidden_ND[chunk]
        products_CV = torch.mm(hidden_CD, weight_VD.T, out=buffer_CV[: len(hidden_CD)])
        yield chunk, hidden_CD, products_CV


def _rows(hidden_ND: Tensor):
    if hidden_ND.is_cuda and hidden_ND.dtype != torch.float64 and rows_triton is not None and kernels_can_be_built():
        return rows_triton
    return rows_torch
