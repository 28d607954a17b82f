"""Chunk by chunk: a matrix product for the logits, then row work, then two products for the gradients.

The row work (``rows_triton`` on a GPU, ``rows_torch`` elsewhere) turns the logits of a chunk into losses and then, in
the same memory, into their own gradient. Any dtype, any option, any device.

Where the vocabulary is divided over ranks, the row work has two parts, between which ranks exchange a few numbers per
row (``vocabulary``): each rank's partial sums, then, from the combined log-sum-exp, the gradient of its own logits. The
gradient of the hidden states is a sum over the ranks; each chunk's is summed while the next one is computed.

With a filter, backward does the same with the columns that ``filtered`` has kept for a group of rows, as if they were
the vocabulary, and adds what stands for the others. It waits for the device once, for the numbers of kept columns.

C chunk, G groups, N tokens, D hidden, V vocabulary, K kept columns of a group.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from lit_fused.ops.linear_cross_entropy import rows_torch
from lit_fused.ops.linear_cross_entropy.building import kernels_can_be_built
from lit_fused.ops.linear_cross_entropy.filtered import (
    GROUP_ROWS,
    ColumnSums,
    Filter,
    KeptColumns,
    groups,
    rows_within_group,
)
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

ROWS_HAVE_FACTORS = False  # in backward: a factor is one more rounding of the logits' gradient


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
) -> tuple[RowResults, Gradients | Filter | None]:
    """Results of every row and, if the plan has them made in forward, the gradients of ``(loss * factor).sum()``; or
    the filter for backward."""
    results = RowResults.zeros(len(targets_N), plan.result_dtype, hidden_ND.device)
    sums = _GradientSums(hidden_ND, weight_VD, plan) if plan.gradients_in_forward else None
    columns = None
    if plan.filter_eps is not None:
        columns = ColumnSums(len(targets_N), len(weight_VD), plan.result_dtype, hidden_ND.device)
    factor = factor if sums is not None and applies_factor(plan) else None
    write_gradient = sums is not None or columns is not None
    for chunk, hidden_CD, logits_CV in _chunks_of_products(hidden_ND, weight_VD, plan):
        work = (logits_CV, targets_N[chunk], bias_V, plan.rows, results[chunk])
        if plan.shard is None:
            _rows(hidden_ND).forward_rows(*work, write_gradient=write_gradient, factor=factor)
        else:
            _forward_sharded_rows(*work, plan.shard, write_gradient=write_gradient, factor=factor)
        if sums is not None:
            sums.add(chunk, hidden_CD, weight_VD, logits_CV)
        if columns is not None:
            columns.add(chunk, logits_CV, plan.rows.scale)
    if columns is not None:
        return results, columns.choose(targets_N, _own_targets(targets_N, weight_VD, plan), results.lse, plan)
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
    targets_N = _own_targets(targets_N, weight_VD, plan)
    for chunk, hidden_CD, logits_CV in _chunks_of_products(hidden_ND, weight_VD, plan):
        factor_C = None if factor_N is None else factor_N[chunk]
        _rows(hidden_ND).backward_rows(logits_CV, targets_N[chunk], bias_V, lse_N[chunk], factor_C, plan.rows)
        sums.add(chunk, hidden_CD, weight_VD, logits_CV)
    return sums.finish()


def filtered_backward(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    lse_N: Tensor,
    nll_N: Tensor,
    factor_N: Tensor | None,
    filter_: Filter,
    plan: Plan,
) -> Gradients:
    """Gradients of ``(loss_N * factor_N).sum()`` from the kept columns, and what stands for the others."""
    sums = _GradientSums(hidden_ND, weight_VD, plan)
    kept = KeptColumns.of(filter_.kept_GV, _own_targets(targets_N, weight_VD, plan))
    tail_GV = filter_.tail_GV.to(plan.compute_dtype)
    tail_hidden_GD = hidden_ND.new_empty(len(tail_GV), hidden_ND.shape[1], dtype=plan.result_dtype)
    multiply(tail_GV, weight_VD, tail_hidden_GD)
    dropped_hidden_GD, dropped_G = torch.zeros_like(tail_hidden_GD), tail_hidden_GD.new_zeros(len(tail_GV))
    for group, (rows, count) in enumerate(zip(groups(len(hidden_ND)), kept.counts_G.tolist(), strict=True)):
        columns_K = kept.columns_GV[group, :count].long()
        weight_KD = weight_VD.index_select(0, columns_K)
        bias_K = None if bias_V is None else bias_V.index_select(0, columns_K)
        columns = _ColumnGradients(sums, columns_K, plan)
        for chunk, hidden_CD, gradient_CK in _chunks_of_products(hidden_ND, weight_KD, plan, rows):
            places_C = kept.target_place_N[chunk]
            _rows(hidden_ND).backward_rows(gradient_CK, places_C, bias_K, lse_N[chunk], None, plan.rows)
            # before anything is rounded once more: a small difference of large sums
            dropped_C = plan.rows.scale * filter_.mass_N[chunk] - gradient_CK.sum(1, dtype=filter_.mass_N.dtype)
            if factor_N is not None:
                gradient_CK.mul_(factor_N[chunk, None])
                dropped_C.mul_(factor_N[chunk])
            sums.add_hidden(chunk, gradient_CK, weight_KD, (dropped_C, tail_hidden_GD[group]))
            columns.add(gradient_CK, hidden_CD)
            dropped_hidden_GD[group] += dropped_C @ hidden_CD.to(dropped_C.dtype)
            dropped_G[group] += dropped_C.sum()
        columns.finish()
        weight_KD = columns = gradient_CK = None  # an exact group has all columns: not beside those of the next
    if sums.weight_VD is not None:
        # of the group's mean: in float16 its sum could overflow, and the tail's small entries have few bits
        tail_GV = (GROUP_ROWS * filter_.tail_GV).to(plan.compute_dtype)
        multiply_add(tail_GV.T, (dropped_hidden_GD / GROUP_ROWS).to(tail_GV.dtype), sums.weight_VD)
    if sums.bias_V is not None:
        sums.bias_V.add_(dropped_G @ filter_.tail_GV)
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
        self.add_hidden(chunk, dlogits_CV, weight_VD)
        if self.weight_VD is not None:
            multiply_add(dlogits_CV.T, hidden_CD, self.weight_VD)
        if self.bias_V is not None:
            self.bias_V.add_(dlogits_CV.sum(0, dtype=self.bias_V.dtype))

    def add_hidden(
        self, chunk: slice, dlogits_CV: Tensor, weight_VD: Tensor, more: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """The chunk's hidden states get dlogits @ weight, and the outer product of ``more``: (C,), (D,)."""
        if self.hidden_ND is None:
            return
        if more is None:
            multiply(dlogits_CV, weight_VD, self.hidden_ND[chunk])
        else:
            product_CD = self.hidden_ND.new_empty(len(dlogits_CV), weight_VD.shape[1], dtype=more[1].dtype)
            multiply(dlogits_CV, weight_VD, product_CD)
            self.hidden_ND[chunk] = product_CD.addr_(*more)
        if self.group is not None:
            work = dist.all_reduce(self.hidden_ND[chunk], group=self.group, async_op=True)
            assert work is not None
            self.exchanges.append(work)

    def finish(self) -> Gradients:
        """The bias is added to scaled products: what reached it is too large by the scale."""
        if self.bias_V is not None:
            self.bias_V.div_(self.scale)
        for exchange in self.exchanges:
            exchange.wait()
        return Gradients(self.hidden_ND, self.weight_VD, self.bias_V)


class _ColumnGradients:
    """Receives a group's gradients of the logits of its kept columns for the weight's and the bias's own sums."""

    def __init__(self, sums: _GradientSums, columns_K: Tensor, plan: Plan) -> None:
        self.sums, self.columns_K = sums, columns_K
        self.weight_KD = self.bias_K = None
        if sums.weight_VD is not None:
            self.weight_KD = sums.weight_VD.new_zeros(len(columns_K), sums.weight_VD.shape[1])
        if sums.bias_V is not None:
            self.bias_K = sums.bias_V.new_zeros(len(columns_K))

    def add(self, dlogits_CK: Tensor, hidden_CD: Tensor) -> None:
        if self.weight_KD is not None:
            multiply_add(dlogits_CK.T, hidden_CD, self.weight_KD)
        if self.bias_K is not None:
            self.bias_K.add_(dlogits_CK.sum(0, dtype=self.bias_K.dtype))

    def finish(self) -> None:
        if self.sums.weight_VD is not None and self.weight_KD is not None:
            self.sums.weight_VD.index_add_(0, self.columns_K, self.weight_KD)
        if self.sums.bias_V is not None and self.bias_K is not None:
            self.sums.bias_V.index_add_(0, self.columns_K, self.bias_K)


def _own_targets(targets_N: Tensor, weight_VD: Tensor, plan: Plan) -> Tensor:
    return targets_N if plan.shard is None else plan.shard.local(targets_N, len(weight_VD))


def _chunks_of_products(
    hidden_ND: Tensor, weight_VD: Tensor, plan: Plan, of: slice | None = None
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield (slice, hidden (C, D), products (C, V)) for all rows or some; the products' memory is the same for every
    chunk."""
    of = slice(0, len(hidden_ND)) if of is None else of
    tokens, vocabulary = of.stop - of.start, len(weight_VD)
    # ranks have to make the same chunks; and a group of ignored rows keeps no column
    largest = max(vocabulary, 1) if plan.shard is None else plan.shard.largest
    rows = chunk_rows(tokens, largest * hidden_ND.itemsize, plan.budget_mib)
    rows = min(rows if plan.filter_eps is None else rows_within_group(rows), tokens)
    buffer_CV = hidden_ND.new_empty(rows, vocabulary)
    for chunk in chunks(of, rows):
        hidden_CD = hidden_ND[chunk]
        products_CV = torch.mm(hidden_CD, weight_VD.T, out=buffer_CV[: len(hidden_CD)])
        yield chunk, hidden_CD, products_CV


def _rows(hidden_ND: Tensor):
    if hidden_ND.is_cuda and hidden_ND.dtype != torch.float64 and rows_triton is not None and kernels_can_be_built():
        return rows_triton
    return rows_torch
