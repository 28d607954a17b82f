"""Chunk by chunk with the softmax inside the matrix product: the bfloat16 head of a Hopper GPU.

The gradient of the logits is p - onehot(target), and p = exp(logit - lse) needs the log-sum-exp of the whole row, which
is why a head usually writes its logits, reads them, and writes their gradient. The trick is that the log-sum-exp is not
needed where the logits are: exp(logit - shift) with *any* shift per row has, in bfloat16, the same relative precision,
because bfloat16 has the exponents of float32. So the product's own epilogue writes these numerators, shifted by an
estimate, and sums them; what they lack is one factor per row, known at the end of the row, which goes where it costs
nothing:

    numerators_CV = exp(softcap(scale * h W^T + b) - shift), 0 at the target
    dh = r * (numerators @ W) - t * W[target]            r = 1 / (sum + the target's own), t = 1 - p[target]
    dW = numerators^T @ (r * h) - scatter(t * h)

No logit is ever rounded to bfloat16 or written to memory; the target's own term is exact in float32. The shift is the
target's logit, from one dot product per token. Where a row's logits exceed it by more than 40 powers of two, the tile
takes its own maximum instead, and the row is brought to one shift afterwards: no input overflows.

Where the vocabulary is divided over ranks, a rank's part of a row is one more tile: three numbers per token are
exchanged, and the logit of the target, which one rank has.

With a filter, forward sums the numerators' columns as well. Backward does all its products by kernels of our own, over
the columns that ``filtered`` has kept: how many they are, only the device knows, and the host does not wait for it.

B block of kept columns, C chunk, D hidden, F frequent targets, G groups, N tokens, R rows of a group, S parts of a sum,
T tiles, V vocabulary. Internally logits are in units of log 2, which is what exp2 wants.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from lit_fused.ops.linear_cross_entropy import one_step_kernels as kernels
from lit_fused.ops.linear_cross_entropy.building import kernels_can_be_built
from lit_fused.ops.linear_cross_entropy.filtered import (
    ColumnSums,
    Filter,
    KeptColumns,
    block_columns,
    groups,
    product_parts,
    rows_within_group,
)
from lit_fused.ops.linear_cross_entropy.one_step_kernels import RowFactors, empty_float32
from lit_fused.ops.linear_cross_entropy.plan import (
    FREQUENT_ROWS,
    MAX_BFLOAT16_CHUNKS,
    ROWS_WITHOUT_GRADIENT,
    TILE_COLUMNS,
    Gradients,
    Plan,
    RowResults,
    VocabularyShard,
    chunk_rows,
    chunks,
)
from lit_fused.ops.linear_cross_entropy.products import multiply, multiply_add

ROWS_HAVE_FACTORS = True  # in backward: one more costs nothing


def applies_factor(plan: Plan) -> bool:
    """Whether ``forward`` multiplies the gradients by its factor."""
    return True


def handles_ignored(hidden_ND: Tensor) -> bool:
    """Whether rows whose target is negative may be among the tokens."""
    return True


def supports(hidden_ND: Tensor, weight_VD: Tensor, plan: Plan) -> bool:
    """Whether this is the way for these tensors: bfloat16 on a Hopper GPU, with rows that its copy engine can fetch."""
    return (
        hidden_ND.is_cuda
        and torch.version.hip is None
        and torch.cuda.get_device_capability(hidden_ND.device)[0] == 9
        and kernels_can_be_built()
        and plan.compute_dtype == torch.bfloat16
        and plan.rows.label_smoothing == 0  # its gradient is not zero where p is: the rows' own kernel has it
        and len(hidden_ND) > 0
        and hidden_ND.shape[1] % 8 == 0
        and _fetchable(hidden_ND)
        and (_fetchable(weight_VD) if plan.shard is None else _every_rank_fetches(weight_VD, plan.shard))
    )


def _fetchable(matrix: Tensor) -> bool:
    """Whether rows are contiguous and begin at multiples of 16 bytes, also once they are cast to bfloat16."""
    return _has_fetchable_rows(matrix) and matrix.data_ptr() % 16 == 0


def _has_fetchable_rows(matrix: Tensor) -> bool:
    return matrix.stride(1) == 1 and matrix.stride(0) % 8 == 0


def _every_rank_fetches(weight_VD: Tensor, shard: VocabularyShard) -> bool:
    """The same answer on every rank: each has some entries, in rows of the same kind. Where they begin may differ."""
    nobody_is_empty = shard.vocabulary > shard.largest * (dist.get_world_size(shard.group) - 1)
    return nobody_is_empty and _has_fetchable_rows(weight_VD)


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
    tokens, device = len(hidden_ND), hidden_ND.device
    results = RowResults.zeros(tokens, torch.float32, device)
    weight_VD, columns_N = _own_part(weight_VD, targets_N, plan.shard)
    columns = None if plan.filter_eps is None else ColumnSums(tokens, len(weight_VD), torch.float32, device)
    stored = plan.gradients_in_forward or columns is not None
    numerators = _Numerators(hidden_ND, weight_VD, bias_V, plan, stored=stored)
    target_logits_N = kernels.target_logits(hidden_ND, weight_VD, bias_V, columns_N, plan.rows)
    if plan.shard is not None:
        dist.all_reduce(target_logits_N, group=plan.shard.group)
    factors = RowFactors.empty(tokens, device)
    sums = _ChunkSums(hidden_ND, weight_VD, columns_N, plan, numerators) if plan.gradients_in_forward else None
    for chunk in chunks(tokens, numerators.rows):
        partial = numerators.compute(chunk, columns_N, target_logits_N)
        kernels.finish_rows(
            partial if plan.shard is None else _of_all_ranks(partial, target_logits_N[chunk], plan.shard),
            targets_N[chunk],
            target_logits_N[chunk],
            factor if columns is None else None,
            results[chunk],
            factors[chunk],
            plan.rows,
        )
        if stored:
            kernels.unify_shifts(numerators.of(chunk), partial, target_logits_N[chunk])
        if sums is not None:
            if plan.shard is not None:
                factors[chunk].target_N.mul_(columns_N[chunk] >= 0)  # the term is the rank's that has the entry
            sums.add(chunk, numerators.of(chunk), factors[chunk])
        if columns is not None:
            kernels.add_columns(numerators.of(chunk), factors[chunk].row_N, *columns.of_group(chunk))
            mass_C = columns.mass_N[chunk]
            kernels.add_mass(partial, target_logits_N[chunk], partial.shifts_C, factors[chunk].row_N, mass_C)
    if columns is not None:
        return results, columns.choose(targets_N, columns_N, results.lse, plan)
    return results, None if sums is None else sums.finish(factors)


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
    """Gradients of ``(loss_N * factor_N).sum()`` from logits that are computed once more.

    Now the shift is the log-sum-exp itself, so that the numerators are the probabilities and r is the row's factor.
    """
    weight_VD, columns_N = _own_part(weight_VD, targets_N, plan.shard)
    shift_N, factors = _known_rows(targets_N, columns_N, lse_N, nll_N, factor_N, plan)
    numerators = _Numerators(hidden_ND, weight_VD, bias_V, plan, stored=True)
    sums = _ChunkSums(hidden_ND, weight_VD, columns_N, plan, numerators)
    for chunk in chunks(len(hidden_ND), numerators.rows):
        numerators.compute(chunk, columns_N, shift_N, partial_sums=False)
        sums.add(chunk, numerators.of(chunk), factors[chunk])
    return sums.finish(factors)


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
    weight_VD, columns_N = _own_part(weight_VD, targets_N, plan.shard)
    shift_N, factors = _known_rows(targets_N, columns_N, lse_N, nll_N, factor_N, plan)
    mass_factor_N = torch.where(targets_N >= 0, 1 + 2 * plan.rows.z_loss * lse_N, 0)
    kept = KeptColumns.of(filter_.kept_GV, columns_N)
    blocks = _KeptBlocks(hidden_ND, weight_VD, bias_V, plan)
    sums = _KeptSums(hidden_ND, weight_VD, columns_N, plan, filter_.tail_GV, blocks)
    for group, rows in enumerate(groups(len(hidden_ND))):
        dropped_R = filter_.mass_N[rows].clone()
        sums.begin_group(rows, factors[rows])
        for block in blocks.of(kept.columns_GV[group], kept.counts_G[group]):
            numerators_RB, weight_BD, partial = blocks.compute(block, rows, kept.target_place_N, shift_N)
            kernels.add_mass(partial, shift_N[rows], shift_N[rows], mass_factor_N[rows], dropped_R, block, sign=-1)
            sums.add(block, numerators_RB, weight_BD, factors[rows])
        if factor_N is not None:
            dropped_R *= factor_N[rows]
        sums.finish_group(group, rows, dropped_R, factors[rows])
    return sums.finish(factors)


def scale_(tensor: Tensor, factor: Tensor) -> Tensor:
    """In place; a factor of one costs nothing, and the host need not know it."""
    kernels.scale_(tensor, factor)
    return tensor


def _own_part(weight_VD: Tensor, targets_N: Tensor, shard: VocabularyShard | None) -> tuple[Tensor, Tensor]:
    """The weight where the copy engine finds it, and the targets that are rows of it: -1 for all others."""
    if shard is None:
        return weight_VD, targets_N
    columns_N = shard.local(targets_N, len(weight_VD))
    weight_VD = weight_VD if _fetchable(weight_VD) else weight_VD.clone()
    return weight_VD, columns_N.where(columns_N < len(weight_VD), -1)


def _of_all_ranks(partial: kernels.PartialSums, target_logits_C: Tensor, shard: VocabularyShard) -> kernels.PartialSums:
    """Each rank's tiles joined to one, of all ranks; the final shift will be written where ``partial`` has it."""

    def own_shift(maxima: Tensor) -> Tensor:
        return torch.where(maxima - target_logits_C > kernels.MAX_EXCESS.value, maxima, target_logits_C)

    maximum_C = partial.maxima_TC.amax(0)
    to_shift_TC = torch.exp2(own_shift(partial.maxima_TC) - own_shift(maximum_C))
    sums = ((part_TC * to_shift_TC).sum(0) for part_TC in (partial.sums_TC, partial.dots_TC))
    numbers = torch.stack([maximum_C, *sums])
    gathered = numbers.new_empty(dist.get_world_size(shard.group), *numbers.shape)
    dist.all_gather(list(gathered), numbers, group=shard.group)
    maxima_RC, sums_RC, dots_RC = (part.contiguous() for part in gathered.unbind(1))
    return kernels.PartialSums(maxima_RC, sums_RC, dots_RC, partial.shifts_C)


def _known_rows(
    targets_N: Tensor, columns_N: Tensor, lse_N: Tensor, nll_N: Tensor, factor_N: Tensor | None, plan: Plan
) -> tuple[Tensor, RowFactors]:
    """The shift, in units of log 2, and the factors of rows whose log-sum-exp is known."""
    valid_N = targets_N >= 0
    shift_N = torch.where(valid_N, lse_N / math.log(2), 1e30)  # an ignored row's numerators are zero
    row_N = 1 + 2 * plan.rows.z_loss * lse_N
    target_N = -torch.expm1(-nll_N) - 2 * plan.rows.z_loss * lse_N * torch.exp(-nll_N)
    if plan.rows.softcap is not None:
        target_N *= 1 - ((lse_N - nll_N) / plan.rows.softcap) ** 2
    if factor_N is not None:
        row_N, target_N = row_N * factor_N, target_N * factor_N
    return shift_N, RowFactors(row_N.where(valid_N, 0), target_N.where(columns_N >= 0, 0))


class _Numerators:
    """Computes numerators chunk by chunk into one buffer, or only their sums into none."""

    def __init__(
        self, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, plan: Plan, *, stored: bool
    ) -> None:
        tokens, hidden_size = hidden_ND.shape
        vocabulary = len(weight_VD)
        largest = vocabulary if plan.shard is None else plan.shard.largest  # ranks have to make the same chunks
        self.inputs, self.plan, self.stored = (hidden_ND, weight_VD, bias_V), plan, stored
        # numerators, two rows of D, partial sums
        row_bytes = 2 * _padded(largest) + 6 * hidden_size + 12 * _tiles(largest)
        rows = chunk_rows(tokens, row_bytes, plan.budget_mib) if stored else ROWS_WITHOUT_GRADIENT
        if plan.filter_eps is not None:
            rows = rows_within_group(rows)
        self.rows = min(tokens, rows)
        self.buffer_CV = hidden_ND.new_empty(self.rows if stored else 0, _padded(vocabulary))[:, :vocabulary]
        slopes = plan.filter_eps is not None and plan.rows.softcap is not None
        self.partial = kernels.PartialSums.empty(_tiles(vocabulary), self.rows, hidden_ND.device, stored=slopes)

    def of(self, chunk: slice) -> Tensor:
        """The chunk's numerators, until another chunk's are computed."""
        return self.buffer_CV[: chunk.stop - chunk.start]

    def compute(
        self, chunk: slice, targets_N: Tensor, shift_N: Tensor, *, partial_sums: bool = True
    ) -> kernels.PartialSums:
        hidden_ND, weight_VD, bias_V = self.inputs
        partial = self.partial.of_rows(chunk.stop - chunk.start)
        kernels.numerators(
            hidden_ND[chunk],
            weight_VD,
            bias_V,
            targets_N[chunk],
            shift_N[chunk],
            self.of(chunk) if self.stored else None,
            partial if partial_sums else None,
            self.plan.rows,
        )
        return partial


class _KeptBlocks:
    """Computes the probabilities of a group's rows in its kept columns, block by block into one buffer.

    A block has the width that the budget allows. Nearly always all kept columns fit into the first one; but the host
    does not know, and so asks for all blocks that the vocabulary may need: those that are empty cost their launches.
    """

    def __init__(self, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, plan: Plan) -> None:
        self.inputs, self.options = (hidden_ND, weight_VD, bias_V), replace(plan.rows, statistics=False)
        vocabulary, hidden_size = weight_VD.shape
        self.rows = rows = groups(len(hidden_ND))[0].stop
        programs = kernels.multiprocessors(hidden_ND.device)
        self.parts = product_parts(rows, hidden_size, programs)
        self.width = block_columns(len(hidden_ND), hidden_size, vocabulary, plan.budget_mib, programs)
        self.numerators_RB = hidden_ND.new_empty(rows, self.width)
        self.weight_BD = weight_VD.new_empty(self.width, hidden_size)
        self.bias_B = None if bias_V is None else bias_V.new_empty(self.width)
        slopes = plan.rows.softcap is not None
        self.partial = kernels.PartialSums.empty(_tiles(self.width), rows, hidden_ND.device, stored=slopes)

    def of(self, columns_V: Tensor, count: Tensor) -> Iterator[kernels.ColumnBlock]:
        for first in range(0, len(columns_V), self.width):
            yield kernels.ColumnBlock(columns_V, count, first, self.width)

    def compute(
        self, block: kernels.ColumnBlock, rows: slice, target_place_N: Tensor, shift_N: Tensor
    ) -> tuple[Tensor, Tensor, kernels.PartialSums]:
        """Probabilities (R, B) and rows of the weight (B, D), and the sums of the former."""
        hidden_ND, weight_VD, bias_V = self.inputs
        numerators_RB = self.numerators_RB[: rows.stop - rows.start]
        partial = self.partial.of_rows(len(numerators_RB))
        kernels.gather(weight_VD, bias_V, block, self.weight_BD, self.bias_B)
        kernels.numerators(
            hidden_ND[rows],
            self.weight_BD,
            self.bias_B,
            target_place_N[rows] - block.first,
            shift_N[rows],
            numerators_RB,
            partial,
            self.options,
            block,
        )
        return numerators_RB, self.weight_BD, partial


def _padded(vocabulary: int) -> int:
    """Length of a row whose successor is aligned, for the copy engine and the vendor's products alike."""
    return triton.cdiv(vocabulary, 64) * 64


def _tiles(vocabulary: int) -> int:
    return triton.cdiv(vocabulary, TILE_COLUMNS)


class _FrequentRows(kernels.ExactRows):
    """The rows of dW whose entries are the most frequent targets, summed in float32 beside a bfloat16 dW.

    Such a row is the difference of two large sums, of probabilities and of targets, that nearly cancel on a trained
    model: rounding the first before the second is subtracted is most of the error of a bfloat16 dW. They cost about 1 %
    of the time, and 2 to 4 % at a small vocabulary (docs/performance.md).
    """

    def __init__(self, targets_N: Tensor, vocabulary: int, hidden_size: int) -> None:
        device = targets_N.device
        counts_V = torch.zeros(vocabulary, dtype=torch.int32, device=device)
        counts_V.scatter_add_(0, targets_N.clamp(min=0).long(), (targets_N >= 0).int())
        counts_F, rows_F = counts_V.topk(min(FREQUENT_ROWS, vocabulary))
        # only the targets' rows are written back: what is no target's must not be summed apart
        slots_F = torch.arange(len(rows_F), dtype=torch.int32, device=device).where(counts_F > 0, -1)
        slots_V = torch.full_like(counts_V, -1).scatter_(0, rows_F, slots_F)
        super().__init__(rows_F, slots_V, empty_float32(len(rows_F), hidden_size, device=device))


class _GradientSums:
    """The gradients of the hidden states, the weight and the bias, while they are summed up."""

    def __init__(self, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, plan: Plan, additions: int) -> None:
        """``additions``: how often the weight's gradient is added to, and rounded."""
        wants_hidden, wants_weight, wants_bias = plan.wanted
        self.inputs = hidden_ND, weight_VD, targets_N
        self.scale = plan.rows.scale
        float32 = plan.float32_accumulation
        if float32 is None:
            float32 = additions > MAX_BFLOAT16_CHUNKS or plan.weight_dtype != torch.bfloat16
        self.group = None if plan.shard is None else plan.shard.group
        self.exchanges: list[dist.Work] = []
        # summed over ranks in float32: in half precision each rank's part would be rounded once more
        hidden_dtype = hidden_ND.dtype if self.group is None else torch.float32
        self.hidden_ND = torch.empty_like(hidden_ND, dtype=hidden_dtype) if wants_hidden else None
        self.weight_VD = self.frequent = None
        if wants_weight:
            dtype = torch.float32 if float32 else plan.compute_dtype
            self.weight_VD = torch.empty(weight_VD.shape, dtype=dtype, device=weight_VD.device)
            if not float32:
                self.frequent = _FrequentRows(targets_N, *weight_VD.shape)
        self.bias_V = weight_VD.new_zeros(len(weight_VD), dtype=torch.float32) if wants_bias else None

    def scaled(self, rows: slice, factors: RowFactors, out_CD: Tensor) -> Tensor:
        """Hidden states times what the numerators lack."""
        return torch.mul(self.inputs[0][rows], (factors.row_N * self.scale)[:, None], out=out_CD[: len(factors.row_N)])

    def put_hidden(
        self, rows: slice, product_SCD: Tensor, factors: RowFactors, dropped: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Turn rows' product of numerators and weight into their gradient."""
        assert self.hidden_ND is not None
        _, weight_VD, targets_N = self.inputs
        out_CD = self.hidden_ND[rows]
        kernels.finish_hidden(product_SCD, weight_VD, targets_N[rows], factors, self.scale, out_CD, dropped)
        if self.group is not None:
            work = dist.all_reduce(out_CD, group=self.group, async_op=True)
            assert work is not None
            self.exchanges.append(work)

    def finish(self, factors: RowFactors) -> Gradients:
        """Subtract the targets' own terms, which are as sparse as the targets are."""
        hidden_ND, _, targets_N = self.inputs
        if self.weight_VD is not None or self.bias_V is not None:
            kernels.subtract_targets(
                hidden_ND, targets_N, factors, self.scale, self.weight_VD, self.bias_V, self.frequent
            )
        for exchange in self.exchanges:
            exchange.wait()
        return Gradients(self.hidden_ND, self.weight_VD, self.bias_V)


class _ChunkSums(_GradientSums):
    """Carries each chunk's numerators to the gradients."""

    def __init__(
        self, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, plan: Plan, numerators: _Numerators
    ) -> None:
        additions = triton.cdiv(len(hidden_ND), numerators.rows)
        super().__init__(hidden_ND, weight_VD, targets_N, plan, additions)
        chunk = numerators.rows, hidden_ND.shape[1]
        self.product_CD = hidden_ND.new_empty(chunk, dtype=torch.float32) if plan.wanted.hidden else None
        self.scaled_CD = hidden_ND.new_empty(chunk) if plan.wanted.weight else None

    def add(self, chunk: slice, numerators_CV: Tensor, factors: RowFactors) -> None:
        if self.product_CD is not None:
            product_CD = self.product_CD[: len(numerators_CV)]
            multiply(numerators_CV, self.inputs[1], product_CD)
            self.put_hidden(chunk, product_CD[None], factors)
        if self.bias_V is not None:
            kernels.add_columns(numerators_CV, factors.row_N, self.bias_V)
        if self.weight_VD is not None and self.scaled_CD is not None:
            scaled_CD = self.scaled(chunk, factors, self.scaled_CD)
            add = multiply if chunk.start == 0 else multiply_add
            add(numerators_CV.T, scaled_CD, self.weight_VD)
            if self.frequent is not None:
                add(numerators_CV.index_select(1, self.frequent.rows_F).T, scaled_CD, self.frequent.sums_FD)


class _KeptSums(_GradientSums):
    """Carries each group's kept columns to the gradients, and the mass of its dropped ones."""

    def __init__(
        self, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, plan: Plan, tail_GV: Tensor, blocks: _KeptBlocks
    ) -> None:
        super().__init__(hidden_ND, weight_VD, targets_N, plan, additions=len(tail_GV) + 1)
        self.tail_GV, self.rounded_tail_GV = tail_GV, tail_GV.to(weight_VD.dtype)
        count, hidden_size, device = len(tail_GV), hidden_ND.shape[1], hidden_ND.device
        self.dropped_G = empty_float32(count, device=device)
        self.product_SRD = self.scaled_RD = self.tail_weight_GD = self.dropped_hidden_GD = None
        if self.hidden_ND is not None:
            self.product_SRD = empty_float32(blocks.parts, blocks.rows, hidden_size, device=device)
            self.tail_weight_GD = empty_float32(count, hidden_size, device=device)  # the mean row of the weight, by q
            multiply(self.rounded_tail_GV, weight_VD, self.tail_weight_GD)
        if self.weight_VD is not None:
            self.weight_VD.zero_()
            self.scaled_RD = hidden_ND.new_empty(blocks.rows, hidden_size)
            self.dropped_hidden_GD = empty_float32(count, hidden_size, device=device)  # sums of dropped mass * h
            if self.frequent is not None:
                self.frequent.sums_FD.zero_()

    def begin_group(self, rows: slice, factors: RowFactors) -> None:
        if self.scaled_RD is not None:
            self.scaled(rows, factors, self.scaled_RD)

    def add(self, block: kernels.ColumnBlock, numerators_RB: Tensor, weight_BD: Tensor, factors: RowFactors) -> None:
        rows = len(numerators_RB)
        if self.product_SRD is not None:
            product_SRD = self._product(rows)
            kernels.multiply_kept(numerators_RB, weight_BD, block, product_SRD, add=block.first > 0)
        if self.bias_V is not None:
            kernels.add_columns(numerators_RB, factors.row_N, self.bias_V, block=block)
        if self.weight_VD is not None and self.scaled_RD is not None:
            kernels.add_kept_rows(numerators_RB, self.scaled_RD[:rows], block, self.weight_VD, self.frequent)

    def finish_group(self, group: int, rows: slice, dropped_R: Tensor, factors: RowFactors) -> None:
        """``dropped_R``: the mass of each row that is in none of the blocks."""
        torch.sum(dropped_R, 0, out=self.dropped_G[group])
        if self.product_SRD is not None and self.tail_weight_GD is not None:
            dropped = dropped_R, self.tail_weight_GD[group]
            self.put_hidden(rows, self._product(len(dropped_R)), factors, dropped)
        if self.dropped_hidden_GD is not None:
            hidden_RD = self.inputs[0][rows]
            multiply(dropped_R[None].to(hidden_RD.dtype), hidden_RD, self.dropped_hidden_GD[group : group + 1])

    def finish(self, factors: RowFactors) -> Gradients:
        if self.weight_VD is not None and self.dropped_hidden_GD is not None:
            rounded_GD = (self.dropped_hidden_GD * self.scale).to(self.rounded_tail_GV.dtype)
            multiply_add(self.rounded_tail_GV.T, rounded_GD, self.weight_VD)
            if self.frequent is not None:
                tail_GF = self.rounded_tail_GV.index_select(1, self.frequent.rows_F)
                multiply_add(tail_GF.T, rounded_GD, self.frequent.sums_FD)
        if self.bias_V is not None:
            self.bias_V.add_(self.dropped_G @ self.tail_GV)
        return super().finish(factors)

    def _product(self, rows: int) -> Tensor:
        """The same memory for a group of fewer rows."""
        assert self.product_SRD is not None
        parts, _, hidden_size = self.product_SRD.shape
        return self.product_SRD.view(-1)[: parts * rows * hidden_size].view(parts, rows, hidden_size)
