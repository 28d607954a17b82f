"""The path that stores the logits of a chunk, and carries their gradient to the inputs by two more products.

N tokens, C chunk, D hidden, V vocabulary.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ..frozen_columns import FrozenColumns
from ..kernel_path import (
    ForwardResult,
    Gradients,
    GradientSums,
    HeadCall,
    Inputs,
    KernelPath,
    KnownRows,
    LogitsGradient,
    RowResults,
    own_columns,
)
from ..options import chunks
from ..products import Products, padded, with_aligned_rows
from .rows_of_ranks import PartialRows, combine
from .rows_torch import Chunk, logits_of_entries, logits_of_products, write_chosen


class LogitsPath(KernelPath):
    """The path that stores the logits of a chunk."""

    rows_have_factors = False  # a factor in backward would be one more rounding of the logits' gradient

    def forward(self, inputs: Inputs, factor_N: Tensor | None, call: HeadCall) -> ForwardResult:
        results = RowResults.zeros(len(inputs.targets_N), inputs.hidden_ND.device, call)
        sums = LogitsSums(inputs, call, self.kernels) if call.gradients_in_forward else None
        rows = self._chunk_rows(len(inputs.hidden_ND), inputs.weight_VD, call)
        for chunk, logits_CV in self._forward_chunks(inputs, results, factor_N, call, rows, sums is not None):
            if sums is not None:
                sums.add(chunk, logits_CV)
        return ForwardResult(results, None if sums is None else sums.finish())

    def backward(self, inputs: Inputs, known: KnownRows, saved: tuple[Tensor, ...], call: HeadCall) -> Gradients:
        hidden_ND, weight_VD, bias_V, _ = inputs
        sums = LogitsSums(inputs, call, self.kernels)
        columns_N = own_columns(inputs.targets_N, inputs, call)
        rows = self._chunk_rows(len(hidden_ND), weight_VD, call)
        gradient = known.gradient or LogitsGradient.of_loss(known.lse_N, known.factor_N, call, known.nll_N)
        for chunk, logits_CV in self._products(hidden_ND, weight_VD, slice(0, len(hidden_ND)), rows, call.frozen):
            self.kernels.backward_rows(Chunk(logits_CV, columns_N[chunk], bias_V, call), gradient.at(chunk))
            if known.chosen is not None:
                values_CK = call.options.scale * known.chosen.gradient_NK[chunk]
                write_chosen(logits_CV, own_columns(known.chosen.entries_NK[chunk], inputs, call), values_CK)
            sums.add(chunk, logits_CV)
        return sums.finish()

    def logits_of(self, entries_NK: Tensor, inputs: Inputs, call: HeadCall) -> Tensor:
        columns_NK = own_columns(entries_NK, inputs, call)
        if call.frozen is None:
            logits_NK = logits_of_entries(columns_NK, inputs, call)
        else:
            logits_NK = self._logits_among_all(columns_NK, inputs, call)
        if call.shard is not None:
            dist.all_reduce(logits_NK, group=call.shard.group)
        return logits_NK

    def _logits_among_all(self, columns_NK: Tensor, inputs: Inputs, call: HeadCall) -> Tensor:
        """Return the logits of columns, zero where this rank has none, by computing all of a chunk, as rows of frozen
        columns are made in tiles."""
        hidden_ND, weight_VD, bias_V, _ = inputs
        logits_NK = hidden_ND.new_zeros(columns_NK.shape, dtype=call.result_dtype)
        rows = self._chunk_rows(len(hidden_ND), weight_VD, call)
        for chunk, products_CV in self._products(hidden_ND, weight_VD, slice(0, len(hidden_ND)), rows, call.frozen):
            here_CK = (columns_NK[chunk] >= 0) & (columns_NK[chunk] < len(weight_VD))
            columns_CK = columns_NK[chunk].where(here_CK, 0)
            bias_CK = None if bias_V is None else bias_V[columns_CK]
            products_CK = products_CV.gather(1, columns_CK)
            logits_CK = logits_of_products(products_CK, bias_CK, call.options, call.result_dtype)
            logits_NK[chunk] = logits_CK.where(here_CK, 0)
        return logits_NK

    def _chunk_rows(self, tokens: int, weight_VD: Tensor, call: HeadCall) -> int:
        """Return the rows of a chunk, which all ranks have to share."""
        largest = max(len(weight_VD), 1) if call.shard is None else call.shard.largest
        return call.chunk_rows(tokens, padded(largest) * weight_VD.itemsize)

    def _forward_chunks(
        self,
        inputs: Inputs,
        results: RowResults,
        factor_N: Tensor | None,
        call: HeadCall,
        rows: int,
        write_gradient: bool,
    ) -> Iterator[tuple[slice, Tensor]]:
        """Write the results of each chunk, and yield its slice and the gradient (C, V) of its products."""
        hidden_ND, weight_VD, bias_V, targets_N = inputs
        of = slice(0, len(hidden_ND))
        for rows_of_chunk, logits_CV in self._products(hidden_ND, weight_VD, of, rows, call.frozen):
            chunk, of_chunk = Chunk(logits_CV, targets_N[rows_of_chunk], bias_V, call), results.of(rows_of_chunk)
            factor_C = None if factor_N is None else factor_N[rows_of_chunk]
            if call.shard is None:
                self.kernels.forward_rows(chunk, of_chunk, write_gradient=write_gradient, factor_C=factor_C)
            else:
                self._forward_rows_of_rank(chunk, of_chunk, write_gradient, factor_C)
            yield rows_of_chunk, logits_CV

    def _forward_rows_of_rank(
        self, chunk: Chunk, results: RowResults, write_gradient: bool, factor_C: Tensor | None
    ) -> None:
        """Do what ``forward_rows`` does for this rank's columns of the products."""
        (rows, width), shard = chunk.products_CV.shape, chunk.call.shard
        assert shard is not None
        own = chunk._replace(targets_C=shard.local(chunk.targets_C, width))
        partial = PartialRows.empty(rows, results.loss.dtype, results.loss.device)
        self.kernels.partial_rows(own, partial)
        combine(partial, chunk.targets_C, chunk.call, shard, results)
        if write_gradient:
            self.kernels.backward_rows(own, LogitsGradient.of_loss(results.lse, factor_C, chunk.call, results.nll))

    def _products(
        self, hidden_ND: Tensor, weight_VD: Tensor, of: slice, rows: int, frozen: FrozenColumns | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield (slice, products (C, V)) for some tokens; every chunk's products lie in the same memory."""
        buffer_CV = with_aligned_rows(hidden_ND, min(rows, of.stop - of.start), len(weight_VD))
        for chunk in chunks(of, len(buffer_CV)):
            products_CV = buffer_CV[: chunk.stop - chunk.start]
            if frozen is None:
                self.kernels.multiply(hidden_ND[chunk], weight_VD.T, products_CV)
            else:
                frozen.multiply(self.kernels, hidden_ND[chunk], weight_VD, products_CV)
            yield chunk, products_CV


class LogitsSums(GradientSums):
    """Carries each chunk's gradient of the logits to the hidden states, the weight and the bias."""

    def __init__(self, inputs: Inputs, call: HeadCall, kernels: Products) -> None:
        # The weight's gradient is float32 also for half weights: the logits are rounded once already, and sums in
        # float16 could overflow before they are scaled.
        rounded = call.options.float32_accumulation is False and call.compute_dtype == torch.bfloat16
        super().__init__(inputs, call, call.compute_dtype if rounded else call.result_dtype)
        self.kernels, self.frozen = kernels, call.frozen

    def add(self, chunk: slice, dlogits_CV: Tensor) -> None:
        if self.hidden_ND is not None:
            if self.frozen is None:
                self.kernels.multiply(dlogits_CV, self.inputs.weight_VD, self.hidden_ND[chunk])
            else:
                self.frozen.hidden_gradient(self.kernels, dlogits_CV, self.inputs.weight_VD, self.hidden_ND[chunk])
            if self.group is not None:
                self.exchange(self.hidden_ND[chunk])
        if self.weight_VD is not None:
            add = self.kernels.multiply_add if self.has_begun else self.kernels.multiply
            trained = slice(0 if self.frozen is None else self.frozen.width, None)
            add(dlogits_CV.T, self.inputs.hidden_ND[chunk, trained], self.weight_VD)
        self.has_begun = True
        if self.bias_V is not None:
            self.bias_V.add_(dlogits_CV.sum(0, dtype=self.bias_V.dtype))

    def finish(self) -> Gradients:
        """Return the gradients; the bias' is divided by the scale, as the bias is added to scaled products."""
        if self.bias_V is not None:
            self.bias_V.div_(self.scale)
        if not self.has_begun:  # no token counts
            self.begin_with_zeros()
        return super().finish()
