"""Chunk by chunk with the softmax inside the matrix product: the bfloat16 head of a Hopper GPU.

The gradient of the logits is p - onehot(target), and p = exp(logit - lse) needs the log-sum-exp of the whole row, which
is why a head usually writes its logits, reads them, and writes their gradient. But the log-sum-exp is not needed where
the logits are: exp(logit - shift) with *any* shift per row has, in bfloat16, the same relative precision, because
bfloat16 has the exponents of float32. So the product's own epilogue writes these numerators, shifted by an estimate,
and sums them; what they lack is one factor per row, known at the end of the row, which is applied where it costs
nothing:

    numerators_CV = exp(softcap(scale * h W^T + b) - shift), 0 at the target
    dh = r * (numerators @ W) - t * W[target]            r = 1 / (sum + the target's own), t = 1 - p[target]
    dW = numerators^T @ (r * h) - scatter(t * h)

No logit is ever rounded to bfloat16 or written to memory; the target's own term is exact in float32. The shift is the
target's logit, from one dot product per token. Where a row's logits exceed it by more than 40 powers of two, the tile
takes its own maximum instead, and the row is brought to one shift afterwards: no input overflows.

Where the vocabulary is divided over ranks, a rank's part of a row is one more tile: three numbers per token are
exchanged, and the logit of the target, which one rank has.

Label smoothing adds e (logit[target] - mean(logits)) to a token's loss, which is linear in the logits: ``smoothing``.

This file, ``hopper_rows`` and ``numerators`` allocate, the kernels write: without kernels the path still allocates what
it does on a GPU.

C chunk, D hidden, F frequent targets, N tokens, R ranks, T tiles, V vocabulary. Logits are in units
of log 2, for exp2.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernel_path import (
    ForwardResult,
    Gradients,
    GradientSums,
    HeadCall,
    Inputs,
    KernelPath,
    KnownRows,
    RowResults,
    own_columns,
)
from ..logits.rows_torch import write_chosen
from ..triton_available import kernels_can_be_built
from ..vocabulary_parallel import VocabularyShard
from .hopper_rows import GROUP_TILES, MAX_EXCESS, ExactRows, PartialSums, RowFactors, empty_float32
from .numerators import Numerators, RowSums, rows_of_chunk
from .smoothing import Smoothing

# dW in bfloat16 is rounded once per chunk. For up to this many its error is below that of the standard head, which
# rounds its logits; for more, sums are kept in float32.
MAX_BFLOAT16_CHUNKS = 24
WAVE = 0.9  # of the multiprocessors, to be worth a product of its own
ROWS_WITHOUT_GRADIENT = 4096  # no chunk of V columns is stored: the L2 cache bounds the rows, not memory


def supports(hidden_ND: Tensor, weight_VD: Tensor, call: HeadCall) -> bool:
    """Return whether the path can run: bfloat16 on a Hopper GPU, with rows that its copy engine can fetch."""
    return (
        hidden_ND.is_cuda
        and torch.version.hip is None
        and torch.cuda.get_device_capability(hidden_ND.device)[0] == 9
        and kernels_can_be_built()
        and computes(hidden_ND, call)
        and fetchable(hidden_ND)
        and (fetchable(weight_VD) if call.shard is None else _every_rank_fetches(weight_VD, call.shard))
    )


def computes(hidden_ND: Tensor, call: HeadCall) -> bool:
    """Return whether the path has the call's dtype, options and shape."""
    return (
        call.compute_dtype == torch.bfloat16
        and (call.options.label_smoothing == 0 or call.options.softcap is None)  # a cap's mean logit is no product
        and len(hidden_ND) > 0
        and hidden_ND.shape[1] % 8 == 0
    )


def fetchable(matrix: Tensor) -> bool:
    """Return whether rows are contiguous and begin at multiples of 16 bytes, also once they are cast to bfloat16."""
    return _has_fetchable_rows(matrix) and matrix.data_ptr() % 16 == 0


def _has_fetchable_rows(matrix: Tensor) -> bool:
    return matrix.stride(1) == 1 and matrix.stride(0) % 8 == 0


def _every_rank_fetches(weight_VD: Tensor, shard: VocabularyShard) -> bool:
    """Return the same answer on every rank: none is empty, and rows are alike. Where they begin may differ."""
    none_is_empty = shard.vocabulary > shard.largest * (dist.get_world_size(shard.group) - 1)
    return none_is_empty and _has_fetchable_rows(weight_VD)


class HopperPath(KernelPath):
    """The path that computes the softmax inside the product."""

    rows_have_factors = True

    def __init__(self, kernels: Any = None) -> None:
        super().__init__(self._own_kernels() if kernels is None else kernels)

    def _own_kernels(self) -> Any:
        from .hopper_kernels import HopperKernels

        return HopperKernels()

    def forward(self, inputs: Inputs, factor_N: Tensor | None, call: HeadCall) -> ForwardResult:
        own = own_part(inputs, call.shard)
        results = RowResults.zeros(len(inputs.targets_N), inputs.hidden_ND.device, call)
        smoothing = Smoothing.of(inputs, own, factor_N, call, self.kernels)
        if call.gradients_in_forward:
            numerators, sums = self._gradients_begun(inputs, own, call, smoothing)
        else:
            numerators, sums = Numerators(own, call, self.kernels, ROWS_WITHOUT_GRADIENT, stored=False), None
        factors = RowFactors.empty(inputs.hidden_ND)
        for chunk, *_ in self._forward_chunks(inputs, own, numerators, factor_N, results, factors, call):
            if smoothing is not None:
                smoothing.add_to(results, factors, chunk)
            if sums is not None:
                if call.shard is not None:
                    factors.of(chunk).target_N.mul_(own.targets_N[chunk] >= 0)  # the rank with the entry has the term
                sums.add(chunk, numerators, factors)
        return ForwardResult(results, None if sums is None else sums.finish_with(factors))

    def backward(self, inputs: Inputs, known: KnownRows, saved: tuple[Tensor, ...], call: HeadCall) -> Gradients:
        """Return the gradients. The shift is now the log-sum-exp itself, so that the numerators are the probabilities
        and r is the row's factor; where rows have weights, they are the logits' gradient itself, and r is one."""
        own = own_part(inputs, call.shard)
        shift_N, factors = known_factors(inputs.targets_N, own.targets_N, known, call)
        smoothing = Smoothing.of(inputs, own, known.factor_N, call, self.kernels)
        numerators, sums = self._gradients_begun(inputs, own, call, smoothing)
        chosen, weights = known.chosen, known.weights
        for chunk in numerators.chunks():
            of_chunk = [numbers_N[chunk] for numbers_N in weights]
            numerators.compute(chunk, shift_N, partial_sums=False, weights=of_chunk)
            if chosen is not None:
                columns_CK = own_columns(chosen.entries_NK[chunk], inputs, call)
                columns_CK = columns_CK.masked_fill(columns_CK == own.targets_N[chunk, None], -1)  # it is apart
                write_chosen(numerators.numerators_CV, columns_CK, chosen.gradient_NK[chunk])
            sums.add(chunk, numerators, factors)
        return sums.finish_with(factors)

    def logits_of(self, entries_NK: Tensor, inputs: Inputs, call: HeadCall) -> Tensor:
        own, logits_NK = own_part(inputs, call.shard), empty_float32(*entries_NK.shape, like=inputs.hidden_ND)
        columns_NK = own_columns(entries_NK, inputs, call)
        columns_NK = columns_NK.where(columns_NK < len(own.weight_VD), -1)
        self.kernels.logits_of(columns_NK.contiguous(), own, call.options, logits_NK)
        if call.shard is not None:
            dist.all_reduce(logits_NK, group=call.shard.group)
        return logits_NK.mul_(math.log(2))

    def _gradients_begun(
        self, inputs: Inputs, own: Inputs, call: HeadCall, smoothing: Smoothing | None
    ) -> tuple[Numerators, "ChunkSums"]:
        """Return where the numerators of each chunk will be stored, and the gradients to which they are carried."""
        rows = self._chunk_rows(inputs, call)
        sums = ChunkSums(own, call, self.kernels, -(-len(own.hidden_ND) // rows), smoothing)
        return Numerators(own, call, self.kernels, rows, stored=True), sums

    def _chunk_rows(self, inputs: Inputs, call: HeadCall) -> int:
        """Return the rows of a chunk, which all ranks have to share."""
        largest = len(inputs.weight_VD) if call.shard is None else call.shard.largest
        tokens, hidden_size = inputs.hidden_ND.shape
        return rows_of_chunk(tokens, hidden_size, largest, call)

    def _forward_chunks(
        self,
        inputs: Inputs,
        own: Inputs,
        numerators: RowSums,
        factor_N: Tensor | None,
        results: RowResults,
        factors: RowFactors,
        call: HeadCall,
    ) -> Iterator[tuple[slice, PartialSums, Tensor]]:
        """Write the results and factors of each chunk, and yield it with its tiles' sums and their first shifts."""
        tokens = len(inputs.targets_N)
        target_logits_N = empty_float32(tokens, like=inputs.hidden_ND)
        self.kernels.logits_of(own.targets_N, own, call.options, target_logits_N)
        if call.shard is not None:
            dist.all_reduce(target_logits_N, group=call.shard.group)
        for chunk in numerators.chunks():
            partial = numerators.compute(chunk, target_logits_N)
            logits_C = target_logits_N[chunk]
            of_row = partial
            if len(partial.sums_TC) > GROUP_TILES:
                of_row = partial.in_groups()
                self.kernels.join_tiles(partial, logits_C, of_row, call.options)
            if call.shard is not None:
                of_row = _of_all_ranks(of_row, logits_C, call.shard)
            self.kernels.finish_rows(
                of_row,
                inputs.targets_N[chunk],
                logits_C,
                None if factor_N is None else factor_N[chunk],
                results.of(chunk),
                factors.of(chunk),
                call.options,
            )
            if results.top1 is not None:
                results.top1[chunk] = partial.top1(inputs.targets_N[chunk], logits_C, call.shard)
            numerators.unify(partial, logits_C)
            yield chunk, partial, logits_C


def own_part(inputs: Inputs, shard: VocabularyShard | None) -> Inputs:
    """Return the weight where the copy engine finds it, and the targets that are rows of it: -1 for all others."""
    if shard is None:
        return inputs
    hidden_ND, weight_VD, bias_V, targets_N = inputs
    columns_N = shard.local(targets_N, len(weight_VD))
    weight_VD = weight_VD if fetchable(weight_VD) else weight_VD.clone()
    return Inputs(hidden_ND, weight_VD, bias_V, columns_N.where(columns_N < len(weight_VD), -1))


def _of_all_ranks(partial: PartialSums, target_logits_C: Tensor, shard: VocabularyShard) -> PartialSums:
    """Return each rank's tiles joined to one, of all ranks; the final shift will be written to ``partial``."""

    def own_shift(maxima: Tensor) -> Tensor:
        return torch.where(maxima - target_logits_C > MAX_EXCESS, maxima, target_logits_C)

    maximum_C = partial.maxima_TC.amax(0)
    above_TC = own_shift(partial.maxima_TC) - own_shift(maximum_C)
    assert partial.dots_TC is not None
    dots_TC = partial.dots_TC + partial.sums_TC * above_TC
    numbers = torch.stack([maximum_C, *((part_TC * above_TC.exp2()).sum(0) for part_TC in (partial.sums_TC, dots_TC))])
    gathered = numbers.new_empty(dist.get_world_size(shard.group), *numbers.shape)
    dist.all_gather(list(gathered), numbers, group=shard.group)
    maxima_RC, sums_RC, dots_RC = (part.contiguous() for part in gathered.unbind(1))
    return PartialSums(maxima_RC, sums_RC, dots_RC, partial.shifts_C)


def known_factors(targets_N: Tensor, columns_N: Tensor, known: KnownRows, call: HeadCall) -> tuple[Tensor, RowFactors]:
    """Return the shift, in units of log 2, and the factors of rows whose log-sum-exp is known."""
    lse_N, nll_N, factor_N, gradient, _ = known
    z_loss, softcap, smoothing = call.options.z_loss, call.options.softcap, call.options.label_smoothing
    ignored_N = targets_N < 0
    shift_N = (lse_N / math.log(2)).masked_fill_(ignored_N, 1e30)  # an ignored row's numerators are zero
    p_N, others_N = torch.exp(-nll_N), -torch.expm1(-nll_N)
    if gradient is None:
        row_N, target_N = 1 + 2 * z_loss * lse_N, others_N - 2 * z_loss * lse_N * p_N - smoothing
    else:  # minus p (base + slope log p) + target, without cancellation where p is nearly one
        assert gradient.base_N is not None
        row_N = torch.ones_like(lse_N) if known.weights else gradient.base_N
        target_N = -p_N * (gradient.base_N + gradient.target_N) - gradient.target_N * others_N
        if gradient.slope_N is not None:
            target_N += gradient.slope_N * p_N * nll_N
    if softcap is not None:
        target_N *= 1 - ((lse_N - nll_N) / softcap) ** 2
    if factor_N is not None:
        row_N, target_N = row_N * factor_N, target_N * factor_N
    return shift_N, RowFactors(row_N.masked_fill(ignored_N, 0), target_N.masked_fill(columns_N < 0, 0))


def gradient_dtype(call: HeadCall, additions: int) -> torch.dtype:
    """Return the dtype of the weight's gradient, to which is added, rounded each time, ``additions`` times."""
    float32 = call.options.float32_accumulation
    if float32 is None:
        float32 = additions > MAX_BFLOAT16_CHUNKS or call.weight_dtype != torch.bfloat16
    return torch.float32 if float32 else call.compute_dtype


class HopperSums(GradientSums):
    """Gradients to which the targets' own terms are added at the end."""

    def __init__(self, own: Inputs, call: HeadCall, kernels: Any, additions: int) -> None:
        """Allocate the gradients; the weight's is added to, and rounded, ``additions`` times."""
        dtype = gradient_dtype(call, additions)
        super().__init__(own, call, dtype)
        self.kernels = kernels
        apart = self.weight_VD is not None and dtype != torch.float32
        self.frequent = ExactRows.most_frequent(own.targets_N, own.weight_VD) if apart else None

    def finish_with(self, factors: RowFactors) -> Gradients:
        """Subtract the targets' own terms, which are as sparse as the targets are, and return the gradients."""
        if self.weight_VD is not None or self.bias_V is not None:
            # Each target's terms are summed in the tokens' order, so that the sum is the same in every run.
            order = torch.sort(self.inputs.targets_N.int(), stable=True)
            sums = (self.weight_VD, self.bias_V, self.frequent)
            self.kernels.subtract_targets(self.inputs.hidden_ND, tuple(order), factors, self.scale, *sums)
        return super().finish()


class ChunkSums(HopperSums):
    """Carries each chunk's numerators to the gradients."""

    def __init__(
        self, own: Inputs, call: HeadCall, kernels: Any, additions: int, smoothing: Smoothing | None = None
    ) -> None:
        super().__init__(own, call, kernels, additions + (smoothing is not None))
        self.smoothing = smoothing
        if smoothing is not None:
            exact_FD = None if self.frequent is None else self.frequent.sums_FD
            smoothing.begin(own.hidden_ND, self.scale, self.weight_VD, exact_FD, self.bias_V, kernels)

    def add(self, chunk: slice, numerators: Numerators, factors: RowFactors) -> None:
        (hidden_ND, weight_VD, _, targets_N), of_chunk = self.inputs, factors.of(chunk)
        numerators_CV, rows = numerators.numerators_CV, chunk.stop - chunk.start
        product_CD, scaled_CD = numerators.product_RD[:rows], numerators.scaled_RD[:rows]
        if self.hidden_ND is not None:
            for part in self._in_whole_waves(rows):
                self.kernels.multiply(numerators_CV[part], weight_VD, product_CD[part])
        if self.bias_V is not None:
            self.kernels.add_columns(numerators_CV, of_chunk.row_N, self.bias_V)
        if self.weight_VD is not None:
            if self.hidden_ND is not None and not len(scaled_CD):
                scaled_CD = self.hidden_ND[chunk]
            self.kernels.scale_rows(hidden_ND[chunk], of_chunk.row_N, self.scale, scaled_CD)
            is_first = chunk.start == 0 and self.smoothing is None
            add = self.kernels.multiply if is_first else self.kernels.multiply_add
            if self.frequent is not None:
                of_frequent_CF = numerators_CV.index_select(1, self.frequent.rows_F)
                add(of_frequent_CF.T, scaled_CD, self.frequent.sums_FD)
            add(numerators_CV.T, scaled_CD, self.weight_VD)
        if self.hidden_ND is not None:
            out_CD = self.hidden_ND[chunk]
            less = None if self.smoothing is None else self.smoothing.of_hidden(chunk)
            self.kernels.finish_hidden(
                product_CD, weight_VD, targets_N[chunk], of_chunk, self.scale, out_CD, dropped=less
            )
            self.exchange(out_CD)

    def _in_whole_waves(self, rows: int) -> list[slice]:
        """Return all rows, or apart from the rest those whose tiles of 256 x 128 fill every multiprocessor."""
        hidden_ND = self.inputs.hidden_ND
        tiles, programs = -(-hidden_ND.shape[1] // 128), self.kernels.multiprocessors(hidden_ND.device)
        wave = programs // tiles  # tiles of rows
        whole = rows // (256 * wave) * 256 * wave if wave * tiles >= WAVE * programs else 0
        return [part for part in (slice(0, whole), slice(whole, rows)) if part.start < part.stop]
