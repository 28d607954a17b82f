"""The filtered backward on Hopper's path.

Forward sums the numerators' columns as well. Backward has two products over the whole vocabulary: with the weight at
its beginning, and to the weight's gradient at its end. Their rows are some that are exact alone and, beside them, each
group's tail. All other products are over blocks of kept columns: how many there are, only the device knows, and the
host does not wait for it.

B block of kept columns, C chunk, D hidden, E rows of the products over all columns, G groups, N tokens, R rows of a
group, S parts of a sum, T tiles, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lit_fused.filtered import kept_columns
from lit_fused.filtered.kept_columns import ColumnSums, KeptColumns, groups, rows_within_group
from lit_fused.ops.hopper.hopper_path import HopperPath, HopperSums, known_factors, own_part
from lit_fused.ops.hopper.hopper_rows import TILE_COLUMNS, PartialSums, RowFactors, empty_float32, first_rows, tiles_of
from lit_fused.ops.hopper.numerators import Numerators
from lit_fused.ops.kernel_path import ForwardResult, Gradients, HeadCall, Inputs, KnownRows, RowResults
from lit_fused.ops.options import TILE_ROWS, chunks
from lit_fused.ops.products import with_aligned_rows

MIN_BLOCK_TILES = 8  # of kept columns, whatever the budget: narrower blocks are bound by their launches


@dataclass
class ColumnBlock:
    """Some of a group's kept columns: the places from ``first`` on, as many as fit and exist."""

    columns: Tensor  # (V,) int32, the group's kept columns
    count: Tensor  # () int32, how many of them
    first: int
    width: int  # at most
    every: bool  # the columns are all, in their order


class ExactRule(NamedTuple):
    """The numbers by which :meth:`ColumnSums.mark_exact` finds rows that are exact alone, and where to write it."""

    small_C: Tensor  # each row's mass in entries up to eps
    nll_C: Tensor
    lse_C: Tensor
    exact_C: Tensor  # bool, written
    z_loss: float
    most: float  # of 1 - p(target), in such entries


class FilteredHopper(HopperPath):
    """The :class:`~lit_fused.ops.kernel_path.KernelPath` whose backward skips columns."""

    def __init__(self, filter_eps: float, kernels: Any = None) -> None:
        super().__init__(kernels)
        self.filter_eps = filter_eps

    def _own_kernels(self) -> Any:
        from lit_fused.filtered.filtered_kernels import FilteredKernels

        return FilteredKernels()

    def forward(self, inputs: Inputs, factor_N: Tensor | None, call: HeadCall) -> ForwardResult:
        own = own_part(inputs, call.shard)
        tokens, vocabulary, device = len(own.hidden_ND), len(own.weight_VD), own.hidden_ND.device
        results = RowResults.zeros(tokens, device, call)
        columns = ColumnSums(self.filter_eps, tokens, vocabulary, torch.float32, device)
        size, most = kept_columns.GROUP_ROWS, self._chunk_rows(inputs, call)
        chunk_rows = most // size * size or rows_within_group(most)
        numerators = _SummedNumerators(own, call, self.kernels, chunk_rows)
        factors = RowFactors.empty(own.hidden_ND)
        work = inputs, own, numerators, None, results, factors, call
        for chunk, partial, estimates_C in self._forward_chunks(*work):
            row_C, mass_C = factors.row_N[chunk], columns.mass_N[chunk]
            small_C, of_chunk = torch.empty_like(row_C), results.of(chunk)
            numerators_CV = numerators.numerators_CV
            bounds = call.options.z_loss, kept_columns.MAX_ROW_DROPPED
            rule = ExactRule(small_C, of_chunk.nll, of_chunk.lse, columns.exact_N[chunk], *bounds)
            # A rank knows the maxima of its own tiles alone.
            maxima = (partial.maxima_TC, partial.shifts_C) if call.shard is None else None
            self.kernels.small_mass(numerators_CV, row_C, self.filter_eps, rule, maxima, call.options)
            if call.shard is not None:
                dist.all_reduce(small_C, group=call.shard.group)
            shifts = estimates_C, partial.shifts_C
            stored_TC = numerators.stored_sums(len(row_C))
            self.kernels.add_mass(stored_TC, partial.maxima_TC, *shifts, row_C, mass_C, rule=rule)
            for rows in chunks(chunk, size):
                of_rows = numerators_CV[rows.start - chunk.start : rows.stop - chunk.start]
                self.kernels.add_filter_columns(of_rows, factors.row_N[rows], *columns.of_group(rows))
        filter_ = columns.choose(inputs.targets_N, own.targets_N, results.nll, call)
        return ForwardResult(results, saved=filter_[:4], statistics=filter_.statistics.unbind())

    def backward(self, inputs: Inputs, known: KnownRows, saved: tuple[Tensor, ...], call: HeadCall) -> Gradients:
        """Return the gradients. Behind all rows stand some once more, first those that are exact alone. Where a row
        does not count, its target is negative."""
        *columns, mass_N, exact_N = saved
        tokens = len(exact_N)
        alone_A = torch.sort(~exact_N, stable=True).indices[: kept_columns.most_rows_alone(tokens)]
        rows = torch.cat([torch.arange(tokens, device=exact_N.device), alone_A])
        exact_A = exact_N[alone_A]
        targets_N = inputs.targets_N[rows].masked_fill_(torch.cat([exact_N, ~exact_A]), -1)
        inputs = inputs._replace(hidden_ND=inputs.hidden_ND[rows], targets_N=targets_N)
        found = self._backward_of_groups(inputs, known.at(rows), columns, mass_N, exact_A, call)
        if found.hidden_ND is not None:
            of_rows, of_alone = found.hidden_ND[:tokens], found.hidden_ND[tokens:]
            of_alone = torch.where(exact_A[:, None], of_alone, of_rows[alone_A])
            found = found._replace(hidden_ND=of_rows.index_copy_(0, alone_A, of_alone))
        return found

    def _backward_of_groups(
        self,
        inputs: Inputs,
        known: KnownRows,
        columns: list[Tensor],
        mass_N: Tensor,
        exact_A: Tensor,
        call: HeadCall,
    ) -> Gradients:
        own, tokens = own_part(inputs, call.shard), len(inputs.targets_N) - len(exact_A)
        shift_N, factors = known_factors(inputs.targets_N, own.targets_N, known, call)
        mass_factor_N = (1 + 2 * call.options.z_loss * known.lse_N).masked_fill_(inputs.targets_N < 0, 0)
        kept = KeptColumns.of(columns[0], own.targets_N[:tokens])
        place_N = torch.cat([kept.target_place_N, own.targets_N[tokens:]])
        vocabulary, exact_rows = kept.columns_GV.shape[1], exact_A.sum()
        whole = slice(tokens, tokens + min(len(exact_A), TILE_ROWS - len(columns[1]) % TILE_ROWS))
        more = chunks(slice(whole.stop, len(place_N)), kept_columns.GROUP_ROWS)
        additions = groups(tokens) + more
        writers_V = _writers(columns[0], exact_rows > whole.stop - whole.start, len(additions))
        sums = _KeptSums(own, call, self.kernels, columns[1], whole, writers_V)
        sums.begin(shift_N, factors)
        blocks = _KeptBlocks(own, call, self.kernels, tokens)
        dropped_N = mass_N.clone()
        for turn, rows in enumerate(additions):
            group = turn if rows.start < tokens else None
            sums.begin_group(rows, factors)
            if group is not None:
                of_group = kept.columns_GV[group], kept.counts_G[group]
            else:  # The device knows if there is such a row.
                every_V = torch.arange(vocabulary, dtype=torch.int32, device=exact_A.device)
                of_group = every_V, ((exact_rows > rows.start - tokens) * vocabulary).int()
            for first_column in range(0, vocabulary, blocks.width):
                width = min(blocks.width, vocabulary - first_column)
                block = ColumnBlock(*of_group, first_column, width, every=group is None)
                weight_BD, numerators_RB, stored_TR, maxima_TR = blocks.compute(block, rows, place_N, shift_N)
                if group is not None:
                    shift_R, masses = shift_N[rows], (mass_factor_N[rows], dropped_N[rows])
                    self.kernels.add_mass(stored_TR, maxima_TR, shift_R, shift_R, *masses, block, sign=-1)
                sums.add_block(block, numerators_RB, weight_BD, factors.of(rows), turn)
            if group is not None and known.factor_N is not None:
                dropped_N[rows] *= known.factor_N[rows]
            sums.finish_group(rows, factors.of(rows), None if group is None else (group, dropped_N[rows]))
        sums.finish_weight(len(additions))
        return sums.finish_with(factors)


class _SummedNumerators(Numerators):
    """Numerators of forward with each tile's sums of what is stored, which a softcap's derivative changes."""

    def __init__(self, own: Inputs, call: HeadCall, kernels: Any, rows: int) -> None:
        super().__init__(own, call, kernels, rows, stored=True)
        sums_TC = self.partial.sums_TC
        self.stored_TC = torch.empty_like(sums_TC) if call.options.softcap is not None else None

    def stored_sums(self, rows: int) -> Tensor:
        return first_rows(self.partial.sums_TC if self.stored_TC is None else self.stored_TC, rows)

    def compute(self, chunk: slice, shift_N: Tensor, *, partial_sums: bool = True, **more: Any) -> PartialSums:
        stored_TC = None if self.stored_TC is None else self.stored_sums(chunk.stop - chunk.start)
        return super().compute(chunk, shift_N, stored_TC=stored_TC)


class _KeptBlocks:
    """Computes the probabilities of a group's rows in its kept columns, block by block into one buffer. One block
    mostly holds all, but the host asks for what the vocabulary may need: an empty one costs its launches."""

    def __init__(self, own: Inputs, call: HeadCall, kernels: Any, tokens: int) -> None:
        self.own, self.options, self.kernels = own, call.options, kernels
        hidden_ND, weight_VD, bias_V, _ = own
        vocabulary, hidden_size = weight_VD.shape
        rows, programs = groups(tokens)[0].stop, kernels.multiprocessors(hidden_ND.device)
        self.width = block_columns(tokens, hidden_size, vocabulary, call.budget_mib, programs)
        self.numerators_RB = hidden_ND.new_empty(rows, self.width)
        self.weight_BD = weight_VD.new_empty(self.width, hidden_size)
        self.bias_B = None if bias_V is None else bias_V.new_empty(self.width)
        self.partial = PartialSums.empty(tiles_of(self.width), rows, hidden_ND)
        self.stored_TR = torch.empty_like(self.partial.sums_TC) if call.options.softcap is not None else None

    def compute(
        self, block: ColumnBlock, rows: slice, target_place_N: Tensor, shift_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the block's rows of the weight (B, D), probabilities (R, B), and tiles' sums and maxima (T, R)."""
        hidden_ND, weight_VD, bias_V, _ = self.own
        numerators_RB = self.numerators_RB[: rows.stop - rows.start]
        partial = self.partial.of(len(numerators_RB))
        stored_TR = None if self.stored_TR is None else first_rows(self.stored_TR, len(numerators_RB))
        if block.every:
            columns = slice(block.first, block.first + block.width)
            weight_BD, bias_B = weight_VD[columns], None if bias_V is None else bias_V[columns]
        else:
            weight_BD, bias_B = self.weight_BD, self.bias_B
            self.kernels.gather(weight_VD, bias_V, block, weight_BD, bias_B)
        place_R = target_place_N[rows] - block.first if block.first else target_place_N[rows]
        inputs = Inputs(hidden_ND[rows], weight_BD, bias_B, place_R)
        self.kernels.numerators(
            inputs, shift_N[rows], numerators_RB, partial, self.options, stored_TC=stored_TR, block=block
        )
        return weight_BD, numerators_RB, partial.sums_TC if stored_TR is None else stored_TR, partial.maxima_TC


class _KeptSums(HopperSums):
    """Carries to the gradients each group's kept columns, the mass of its dropped ones, and some exact rows.

    A row of the weight's gradient is written by the first addition that has it, and never cleared before.
    """

    def __init__(
        self, own: Inputs, call: HeadCall, kernels: Any, tail_GV: Tensor, whole: slice, writers_V: Tensor
    ) -> None:
        """``whole``: the rows that are exact in all columns; ``writers_V``: as :func:`_writers` returns them."""
        hidden_ND, weight_VD, _, _ = own
        tokens, count, hidden_size, vocabulary = whole.start, len(tail_GV), hidden_ND.shape[1], len(weight_VD)
        rows, exact = groups(tokens)[0].stop, whole.stop - whole.start
        super().__init__(own, call, kernels, additions=count + 1)
        self.options, self.tail_GV, self.whole, self.writers_V = call.options, tail_GV, whole, writers_V
        self.whole_EV = with_aligned_rows(hidden_ND, exact + count, vocabulary)
        self.dropped_G = None if self.bias_V is None else empty_float32(count, like=hidden_ND)
        self.product_SRD = self.product_ED = self.scaled_RD = self.scaled_ED = None
        if self.hidden_ND is not None:
            parts = product_parts(rows, hidden_size, kernels.multiprocessors(hidden_ND.device))
            self.product_SRD = empty_float32(parts, rows, hidden_size, like=hidden_ND)
            self.product_ED = empty_float32(exact + count, hidden_size, like=hidden_ND)
        if self.weight_VD is not None:
            self.scaled_RD = hidden_ND.new_empty(rows, hidden_size)
            self.scaled_ED = hidden_ND.new_empty(exact + count, hidden_size)
            if self.frequent is not None:
                self.frequent.sums_FD.zero_()

    def begin(self, shift_N: Tensor, factors: RowFactors) -> None:
        """Compute what is whole, and finish the hidden states' gradient of its exact rows."""
        hidden_ND, weight_VD, bias_V, targets_N = self.inputs
        rows, exact, of_rows = self.whole, self.whole.stop - self.whole.start, factors.of(self.whole)
        inputs, exact_EV = Inputs(hidden_ND[rows], weight_VD, bias_V, targets_N[rows]), self.whole_EV[:exact]
        self.kernels.numerators(inputs, shift_N[rows], exact_EV, None, self.options)
        self.whole_EV[exact:] = self.tail_GV
        if self.hidden_ND is not None and self.product_ED is not None:
            self.kernels.multiply(self.whole_EV, weight_VD, self.product_ED)
            out_ED = self.hidden_ND[rows]
            self.kernels.finish_hidden(self.product_ED[:exact], weight_VD, targets_N[rows], of_rows, self.scale, out_ED)
            self.exchange(out_ED)
        if self.bias_V is not None:
            self.kernels.add_columns(exact_EV, of_rows.row_N, self.bias_V)
        if self.scaled_ED is not None:
            self.kernels.scale_rows(hidden_ND[rows], of_rows.row_N, self.scale, self.scaled_ED[:exact])

    def begin_group(self, rows: slice, factors: RowFactors) -> None:
        if self.scaled_RD is not None:
            out_RD = self.scaled_RD[: rows.stop - rows.start]
            self.kernels.scale_rows(self.inputs.hidden_ND[rows], factors.row_N[rows], self.scale, out_RD)

    def add_block(
        self, block: ColumnBlock, numerators_RB: Tensor, weight_BD: Tensor, factors: RowFactors, turn: int
    ) -> None:
        """Add a block's part to the gradients."""
        rows = len(numerators_RB)
        if self.product_SRD is not None:
            self.kernels.multiply_kept(numerators_RB, weight_BD, block, self._product(rows), add=block.first > 0)
        if self.bias_V is not None:
            self.kernels.add_filter_columns(numerators_RB, factors.row_N, self.bias_V, block=block)
        if self.weight_VD is not None and self.scaled_RD is not None:
            sums = self.weight_VD, self.frequent, self.writers_V
            self.kernels.add_kept_rows(numerators_RB, self.scaled_RD[:rows], block, *sums, turn)

    def finish_group(self, rows: slice, factors: RowFactors, dropped: tuple[int, Tensor] | None) -> None:
        """Finish the hidden states' gradient, given the group and each row's mass that is in none of the blocks."""
        hidden_ND, weight_VD, _, targets_N = self.inputs
        count = len(self.tail_GV)
        if self.hidden_ND is not None and self.product_ED is not None:
            out_RD = self.hidden_ND[rows]
            # The tail's product is the mean row of the weight, by q.
            outer = None if dropped is None else (dropped[1], self.product_ED[-count:][dropped[0]])
            of_rows = (self._product(len(out_RD)), weight_VD, targets_N[rows], factors, self.scale)
            self.kernels.finish_hidden(*of_rows, out_RD, dropped=outer)
            self.exchange(out_RD)
        if dropped is not None:
            group, dropped_R = dropped
            if self.dropped_G is not None:
                torch.sum(dropped_R, 0, out=self.dropped_G[group])
            if self.scaled_ED is not None:
                rounded_1R = torch.mul(dropped_R[None], self.scale, out=hidden_ND.new_empty(1, len(dropped_R)))
                self.kernels.multiply(rounded_1R, hidden_ND[rows], self.scaled_ED[-count:][group : group + 1])

    def finish_weight(self, turn: int) -> None:
        """Add what is whole to the gradients of weight and bias."""
        if self.weight_VD is not None and self.scaled_ED is not None:
            self.kernels.finish_weight(self.whole_EV, self.scaled_ED, self.weight_VD, self.writers_V, turn)
            if self.frequent is not None:
                of_frequent_EF = self.whole_EV.index_select(1, self.frequent.rows_F)
                self.kernels.multiply_add(of_frequent_EF.T, self.scaled_ED, self.frequent.sums_FD)
        if self.bias_V is not None and self.dropped_G is not None:
            self.bias_V.add_(self.dropped_G @ self.tail_GV)

    def _product(self, rows: int) -> Tensor:
        """Return the same memory for a group of fewer rows."""
        assert self.product_SRD is not None
        parts, _, hidden_size = self.product_SRD.shape
        return self.product_SRD.view(-1)[: parts * rows * hidden_size].view(parts, rows, hidden_size)


def _writers(kept_GV: Tensor, more: Tensor, last: int) -> Tensor:
    """Return the turn (V,) in which each row of the weight's gradient is written: that of the first group that keeps
    it. The others are written in the turn after the groups, if there are ``more`` exact rows, or in the last one."""
    writers_V = kept_GV.cumsum(0).eq(0).sum(0, dtype=torch.int32)
    return writers_V.masked_fill_((writers_V == len(kept_GV)) & ~more, last)


def product_parts(rows: int, hidden_size: int, programs: int) -> int:
    """Return among how many programs each tile of a group's product with the weight (R, D) is shared, so that none is
    idle for half of the last round."""
    tiles = -(-rows // TILE_ROWS) * -(-hidden_size // TILE_COLUMNS)

    def cost(count: int) -> float:
        idle = -(-tiles * count // programs) * programs / (tiles * count) - 1
        return idle + 0.05 * count  # each costs a product of float32 in memory

    return min((1, 2, 4, 8, 16), key=cost)


def block_columns(tokens: int, hidden_size: int, vocabulary: int, budget_mib: float, programs: int) -> int:
    """Return how many kept columns the kernels take at once, in whole tiles: those that fit the budget."""
    rows = min(tokens, kept_columns.GROUP_ROWS)
    parts = product_parts(rows, hidden_size, programs)
    row_bytes = hidden_size * (4 * parts + 2)  # the product with the weight, and the scaled hidden states
    whole_bytes = TILE_ROWS * (2 * vocabulary + 6 * hidden_size)  # the same, and probabilities, of rows in all columns
    column_bytes = 2 * (rows + hidden_size) + 16 * rows / TILE_COLUMNS  # probabilities, weight, partial sums
    marks_bytes = 24 * vocabulary * len(groups(tokens))  # and places: not a matter of the block
    fitting = int((budget_mib * 2**20 - rows * row_bytes - whole_bytes - marks_bytes) / column_bytes)
    return min(max(fitting // TILE_COLUMNS, MIN_BLOCK_TILES), -(-vocabulary // TILE_COLUMNS)) * TILE_COLUMNS
