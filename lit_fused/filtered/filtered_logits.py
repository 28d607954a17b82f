"""The filtered backward on the path that stores logits.

Backward does what the exact path does with the columns that are kept for a group of rows, as if they were the
vocabulary, and adds what stands for the others. It waits for the device once, for the numbers of kept columns.

C chunk, G groups, N tokens, D hidden, V vocabulary, K kept columns of a group.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_fused.filtered import kept_columns
from lit_fused.filtered.kept_columns import ColumnSums, KeptColumns, groups, rows_within_group
from lit_fused.ops.kernel_path import (
    ForwardResult,
    Gradients,
    HeadCall,
    Inputs,
    KnownRows,
    LogitsGradient,
    RowResults,
    own_columns,
)
from lit_fused.ops.logits.logits_path import LogitsPath, LogitsSums
from lit_fused.ops.logits.rows_torch import Chunk
from lit_fused.ops.products import with_aligned_rows


class FilteredLogits(LogitsPath):
    """The :class:`~lit_fused.ops.kernel_path.KernelPath` whose backward skips columns."""

    def __init__(self, filter_eps: float, kernels: Any) -> None:
        super().__init__(kernels)
        self.filter_eps = filter_eps

    def forward(self, inputs: Inputs, factor_N: Tensor | None, call: HeadCall) -> ForwardResult:
        tokens, vocabulary, device = len(inputs.targets_N), len(inputs.weight_VD), inputs.hidden_ND.device
        results = RowResults.zeros(tokens, device, call)
        columns = ColumnSums(self.filter_eps, tokens, vocabulary, call.result_dtype, device)
        rows = rows_within_group(self._chunk_rows(tokens, inputs.weight_VD, call))
        columns_N = own_columns(inputs.targets_N, inputs, call)
        for chunk, gradient_CV in self._forward_chunks(inputs, results, None, call, rows, write_gradient=True):
            columns.add(chunk, gradient_CV, columns_N[chunk], results.of(chunk), call)
        filter_ = columns.choose(inputs.targets_N, columns_N, results.nll, call)
        return ForwardResult(results, saved=filter_[:4], statistics=filter_.statistics.unbind())

    def backward(self, inputs: Inputs, known: KnownRows, saved: tuple[Tensor, ...], call: HeadCall) -> Gradients:
        hidden_ND, weight_VD, bias_V, targets_N = inputs
        kept_GV, exact_tail_GV, mass_N, exact_N = saved
        sums = LogitsSums(inputs, call, self.kernels)
        sums.begin_with_zeros()
        call_of_columns = replace(call, wanted=call.wanted._replace(hidden=False))
        # The targets of rows that are exact alone need not be among the kept columns.
        columns_N = own_columns(inputs.targets_N, inputs, call).masked_fill(exact_N, len(weight_VD))
        kept = KeptColumns.of(kept_GV, columns_N)
        tail_GV = with_aligned_rows(hidden_ND, len(exact_tail_GV), len(weight_VD)).copy_(exact_tail_GV)
        tail_weight_GD = hidden_ND.new_empty(len(tail_GV), hidden_ND.shape[1], dtype=call.result_dtype)
        self.kernels.multiply(tail_GV, weight_VD, tail_weight_GD)
        dropped_hidden_GD, dropped_G = torch.zeros_like(tail_weight_GD), tail_weight_GD.new_zeros(len(tail_GV))
        for group, (rows, count) in enumerate(zip(groups(len(hidden_ND)), kept.counts_G.tolist(), strict=True)):
            columns_K = kept.columns_GV[group, :count].long()
            weight_KD = weight_VD.index_select(0, columns_K)
            bias_K = None if bias_V is None else bias_V.index_select(0, columns_K)
            columns = LogitsSums(Inputs(hidden_ND, weight_KD, bias_K, targets_N), call_of_columns, self.kernels)
            chunk_rows = rows_within_group(self._chunk_rows(rows.stop - rows.start, weight_KD, call))
            for chunk, gradient_CK in self._products(hidden_ND, weight_KD, rows, chunk_rows):
                places_C, nll_C = kept.target_place_N[chunk], known.nll_N[chunk]
                gradient = LogitsGradient.of_loss(known.lse_N[chunk], None, call, nll_C)
                self.kernels.backward_rows(Chunk(gradient_CK, places_C, bias_K, call), gradient)
                gradient_CK.masked_fill_(exact_N[chunk, None], 0)
                # The mass is taken before anything is rounded once more: it is a small difference of large sums.
                dropped_C = call.options.scale * mass_N[chunk] - gradient_CK.sum(1, dtype=mass_N.dtype)
                if known.factor_N is not None:
                    gradient_CK.mul_(known.factor_N[chunk, None])
                    dropped_C.mul_(known.factor_N[chunk])
                hidden_CD = hidden_ND[chunk]
                if sums.hidden_ND is not None:
                    product_CD = torch.empty_like(hidden_CD, dtype=tail_weight_GD.dtype)
                    self.kernels.multiply(gradient_CK, weight_KD, product_CD)
                    sums.hidden_ND[chunk] = product_CD.addr_(dropped_C, tail_weight_GD[group])
                    del product_CD  # not beside that of the next chunk
                    sums.exchange(sums.hidden_ND[chunk])
                columns.add(chunk, gradient_CK)
                dropped_hidden_GD[group] += dropped_C @ hidden_CD.to(dropped_C.dtype)
                dropped_G[group] += dropped_C.sum()
            for whole, part in ((sums.weight_VD, columns.weight_VD), (sums.bias_V, columns.bias_V)):
                if whole is not None and part is not None:
                    whole.index_add_(0, columns_K, part)
            # An exact group has all columns: they must not lie in memory beside those of the next group.
            weight_KD = columns = part = gradient_CK = None
        if sums.weight_VD is not None:
            # The product is of the group's mean: in float16 its sum could overflow, and the tail's small entries have
            # few bits.
            size = kept_columns.GROUP_ROWS
            tail_GV.copy_(size * exact_tail_GV)
            self.kernels.multiply_add(tail_GV.T, (dropped_hidden_GD / size).to(tail_GV.dtype), sums.weight_VD)
        if sums.bias_V is not None:
            sums.bias_V.add_(dropped_G @ exact_tail_GV)
        return self._with_exact_rows(sums.finish(), inputs, known, exact_N, call)

    def _with_exact_rows(
        self, found: Gradients, inputs: Inputs, known: KnownRows, exact_N: Tensor, call: HeadCall
    ) -> Gradients:
        """Add the gradients of the rows that are exact alone."""
        exact_N = exact_N.nonzero()[:, 0]
        if len(exact_N):
            hidden_ND, weight_VD, bias_V, targets_N = inputs
            rows = Inputs(hidden_ND.index_select(0, exact_N), weight_VD, bias_V, targets_N[exact_N])
            of_rows = known.at(exact_N)
            exact = super().backward(rows, of_rows, (), call)
            if found.hidden_ND is not None and exact.hidden_ND is not None:
                found.hidden_ND.index_copy_(0, exact_N, exact.hidden_ND)
            for whole, part in ((found.weight_VD, exact.weight_VD), (found.bias_V, exact.bias_V)):
                if whole is not None and part is not None:
                    whole.add_(part)
        return found
