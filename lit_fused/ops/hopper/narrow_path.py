"""The path of small hidden sizes, as recommenders have: no numerator is stored.

What limits ``hopper_path`` there is memory: it writes the numerators (N, V) once and reads them twice, for products
that are themselves small. So here they are computed twice and stay on the multiprocessor, as in an attention whose keys
and values are the rows of the weight. One kernel walks the vocabulary for some tokens and multiplies their numerators
by the weight, for the gradient of the hidden states; another walks the tokens for some rows of the weight and
multiplies by the hidden states, for the weight's. Each sum is in float32 and rounded once.

The formulas and the shift are those of ``hopper_path``. A *part* of a row is what one program walks, and has the sums
that a tile has there.

D hidden, N tokens, S parts, V vocabulary.
"""

from typing import Any

from torch import Tensor

from ..kernel_path import ForwardResult, Gradients, HeadCall, Inputs, KnownRows, RowResults
from ..options import chunk_rows
from .hopper_path import HopperPath, HopperSums, known_factors, own_part
from .hopper_rows import PART_ROWS, PartialSums, RowFactors, empty_float32
from .numerators import RowSums

# Beyond it a program's sums do not fit into the registers beside a tile of logits.
LARGEST_HIDDEN = 128
# The tensor cores cut off what they add to a sum, so its error grows with its length: over 2.5 million entries it was
# 1e-2, five times that of rounding to bfloat16.
LONGEST_SUM, MOST_TOKENS = 2**17, 2**18


def computes(hidden_ND: Tensor, call: HeadCall) -> bool:
    """Return whether the path has the shape, and the options."""
    tokens, hidden_size = hidden_ND.shape
    return not call.options.label_smoothing and hidden_size <= LARGEST_HIDDEN and tokens <= MOST_TOKENS


class NarrowPath(HopperPath):
    """The path that computes the numerators once for each gradient."""

    def _own_kernels(self) -> Any:
        from .narrow_kernels import NarrowKernels

        return NarrowKernels()

    def forward(self, inputs: Inputs, factor_N: Tensor | None, call: HeadCall) -> ForwardResult:
        if call.top1:
            return super().forward(inputs, factor_N, call)
        own = own_part(inputs, call.shard)
        results = RowResults.zeros(len(inputs.targets_N), inputs.hidden_ND.device, call)
        factors = RowFactors.empty(inputs.hidden_ND)
        sums = _NarrowSums(own, call, self.kernels) if call.gradients_in_forward else None
        parts = _Parts(own, call, self.kernels, product=sums is not None and call.wanted.hidden)
        for chunk, partial, logits_C in self._forward_chunks(inputs, own, parts, factor_N, results, factors, call):
            if sums is not None:
                if call.shard is not None:
                    factors.of(chunk).target_N.mul_(own.targets_N[chunk] >= 0)  # the rank with the entry has the term
                sums.add_hidden(chunk, parts.product(chunk), (partial.maxima_TC, logits_C, partial.shifts_C), factors)
        return ForwardResult(results, None if sums is None else sums.finish_of(parts.shift_N, factors))

    def backward(self, inputs: Inputs, known: KnownRows, saved: tuple[Tensor, ...], call: HeadCall) -> Gradients:
        if known.weights:
            return super().backward(inputs, known, saved, call)
        own = own_part(inputs, call.shard)
        shift_N, factors = known_factors(inputs.targets_N, own.targets_N, known, call)
        sums = _NarrowSums(own, call, self.kernels)
        if call.wanted.hidden:
            parts = _Parts(own, call, self.kernels, product=True)
            for chunk in parts.chunks():
                parts.compute(chunk, shift_N, partial_sums=False)
                sums.add_hidden(chunk, parts.product(chunk), None, factors)
        return sums.finish_of(shift_N, factors)


class _Parts(RowSums):
    """Computes the sums of a row's parts, as ``Numerators`` does a tile's, and with ``product`` numerators @ weight."""

    def __init__(self, own: Inputs, call: HeadCall, kernels: Any, *, product: bool) -> None:
        tokens, hidden_size = own.hidden_ND.shape
        self.own, self.options, self.kernels = own, call.options, kernels
        # All ranks have to cut the same chunks.
        largest = len(own.weight_VD) if call.shard is None else call.shard.largest
        shares = -(-largest // LONGEST_SUM)
        row_bytes = shares * (4 * hidden_size + 12)
        fitting = chunk_rows(tokens, row_bytes, call.budget_mib, call.options.chunk_size, tile=1, parts=1)
        self.rows = min(tokens, fitting)
        # Programs share a multiprocessor: one loads and multiplies under the exponentials of another.
        programs = (3 if hidden_size <= 64 else 2) * kernels.multiprocessors(own.hidden_ND.device)
        count = max(1, programs // -(-self.rows // PART_ROWS))
        self.count = count * -(-shares // count)
        self.partial = PartialSums.empty(self.count, self.rows, own.hidden_ND)
        self.shift_N = empty_float32(tokens, like=own.hidden_ND)
        size = self.count * self.rows, hidden_size
        self._product = empty_float32(*size, like=own.hidden_ND) if product else None

    def product(self, chunk: slice) -> Tensor | None:
        """Return the parts (S, C, D) of the chunk's product, until another chunk's are computed."""
        if self._product is None:
            return None
        rows = chunk.stop - chunk.start
        return self._product[: self.count * rows].view(self.count, rows, -1)

    def compute(self, chunk: slice, shift_N: Tensor, *, partial_sums: bool = True) -> PartialSums:
        hidden_ND, weight_VD, bias_V, targets_N = self.own
        partial = self.partial.of(chunk.stop - chunk.start)._replace(shifts_C=self.shift_N[chunk])
        self.kernels.multiply_numerators(
            Inputs(hidden_ND[chunk], weight_VD, bias_V, targets_N[chunk]),
            shift_N[chunk],
            self.product(chunk),
            partial if partial_sums else None,
            self.count,
            self.options,
        )
        return partial


class _NarrowSums(HopperSums):
    """Gradients of which the weight's is written at once, when the factors of all rows are known."""

    def __init__(self, own: Inputs, call: HeadCall, kernels: Any) -> None:
        super().__init__(own, call, kernels, additions=1)
        self.options = call.options

    def add_hidden(
        self,
        chunk: slice,
        product_SCD: Tensor | None,
        shifts: tuple[Tensor, Tensor, Tensor] | None,
        factors: RowFactors,
    ) -> None:
        """Write the chunk's gradient of the hidden states, given each part's maxima, the estimate and final shift."""
        if self.hidden_ND is None or product_SCD is None:
            return
        _, weight_VD, _, targets_N = self.inputs
        out_CD, of_chunk = self.hidden_ND[chunk], factors.of(chunk)
        self.kernels.finish_hidden(product_SCD, weight_VD, targets_N[chunk], of_chunk, self.scale, out_CD, shifts)
        self.exchange(out_CD)

    def finish_of(self, shift_N: Tensor, factors: RowFactors) -> Gradients:
        """Write the gradients of weight and bias, and return all."""
        if self.weight_VD is not None or self.bias_V is not None:
            sums = (self.weight_VD, self.bias_V, self.frequent)
            self.kernels.multiply_hidden(self.inputs, shift_N, factors.row_N, self.options, *sums)
        return self.finish_with(factors)
