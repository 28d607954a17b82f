"""The memory of ``hopper_path``'s numerators, and the chunks into which tokens are cut for it.

C chunk, D hidden, N tokens, R rows of the memory, T tiles, V vocabulary.
"""

from typing import Any

from torch import Tensor

from ..kernel_path import HeadCall, Inputs
from ..options import TILE_ROWS, chunks
from ..products import padded, with_aligned_rows
from .hopper_rows import PartialSums, empty_float32, tiles_of


def rows_of_chunk(tokens: int, hidden_size: int, vocabulary: int, call: HeadCall) -> int:
    """Return the rows of a chunk: a row has its numerators, sums of tiles, product with the weight and scaled input."""
    # cuBLAS's product with the weight takes 5 to 8 % longer at these hidden sizes for an odd number of tiles.
    tile = 2 * TILE_ROWS if hidden_size % 2048 == 0 else TILE_ROWS
    itemsize, kinds = call.compute_dtype.itemsize, 2 + has_dots(call) + call.top1
    product_and_input = hidden_size * (4 * call.wanted.hidden + itemsize * scales(call))
    row_bytes = itemsize * padded(vocabulary) + 4 * kinds * tiles_of(vocabulary) + product_and_input + 4
    return call.chunk_rows(tokens, row_bytes, tile=tile)


def has_dots(call: HeadCall) -> bool:
    """Return whether a tile's sums have a third kind, which ranks always exchange."""
    return call.options.statistics or call.shard is not None


def scales(call: HeadCall) -> bool:
    """Return whether a chunk's scaled hidden states need memory: rows of their gradient, written later, are as large
    if they have the same dtype."""
    return call.wanted.weight and not (call.wanted.hidden and call.shard is None)


class RowSums:
    """Computes each row's sums, by tiles or other parts of it, chunk by chunk."""

    own: Inputs
    rows: int  # of a chunk

    def chunks(self) -> list[slice]:
        """Return the tokens of each chunk."""
        return chunks(len(self.own.hidden_ND), self.rows)

    def compute(self, chunk: slice, shift_N: Tensor) -> PartialSums:
        """Return the sums of the chunk's rows."""
        raise NotImplementedError

    def unify(self, partial: PartialSums, logits_C: Tensor) -> None:
        """Bring what is stored of the last chunk to the final shifts."""


class Numerators(RowSums):
    """Computes numerators chunk by chunk into memory that all chunks share, or only their sums."""

    numerators_CV: Tensor  # of the last chunk

    def __init__(self, own: Inputs, call: HeadCall, kernels: Any, rows: int, *, stored: bool) -> None:
        self.own, self.call, self.kernels, self.stored = own, call, kernels, stored
        hidden_ND, vocabulary = own.hidden_ND, len(own.weight_VD)
        (tokens, hidden_size), tiles = hidden_ND.shape, tiles_of(vocabulary)
        self.rows = rows = min(tokens, rows)
        self.partial = PartialSums.empty(tiles, rows, hidden_ND, dots=has_dots(call), places=call.top1)
        if stored:
            self.memory_RV = with_aligned_rows(hidden_ND, rows, vocabulary)
            self.product_RD = empty_float32(rows * call.wanted.hidden, hidden_size, like=hidden_ND)
            self.scaled_RD = hidden_ND.new_empty(rows * scales(call), hidden_size)

    def unify(self, partial: PartialSums, logits_C: Tensor) -> None:
        if self.stored:
            self.kernels.unify_shifts(self.numerators_CV, partial, logits_C)

    def compute(self, chunk: slice, shift_N: Tensor, *, partial_sums: bool = True, **more: Any) -> PartialSums:
        hidden_ND, weight_VD, bias_V, targets_N = self.own
        rows = chunk.stop - chunk.start
        partial = self.partial.of(rows)
        if self.stored:
            self.numerators_CV = self.memory_RV[:rows]
        self.kernels.numerators(
            Inputs(hidden_ND[chunk], weight_VD, bias_V, targets_N[chunk]),
            shift_N[chunk],
            self.numerators_CV if self.stored else None,
            partial if partial_sums else None,
            self.call.options,
            **more,
        )
        return partial
