"""The memory of ``hopper_path``'s numerators, and the chunks into which tokens are cut for it.

A chunk's numerators are C x V numbers in bfloat16. The gradient of the weight, V x D, is written when they are all
known, so until then its memory has room for those of D tokens, or of 2 D where it is float32. There the first chunk can
be stored without memory of its own, in blocks of columns: those of the first block lie in the buffer of the other
chunks, and those of each next one where the gradient of the block before it will be. The gradient is then written from
the last block to the first, so that each product overwrites numerators that have been read.

B block of columns, C chunk, D hidden, F some entries, N tokens, T tiles, V vocabulary.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_fused.ops.chunks import TILE_ROWS, chunk_rows, chunks
from lit_fused.ops.hopper.hopper_rows import TILE_COLUMNS, PartialSums, tiles_of
from lit_fused.ops.kernel_path import HeadCall, Inputs

MIB = 2**20
BLOCKS = 4  # of a first chunk, where nothing asks for more or less: each costs launches and a pass over the product
MOST_BLOCKS = 32


def padded(vocabulary: int) -> int:
    """Return the length of a row whose successor is aligned, for the copy engine and the vendor's products alike."""
    return -(-vocabulary // 64) * 64


def has_dots(call: HeadCall) -> bool:
    """Return whether a tile's sums have a third kind, which ranks always exchange."""
    return call.options.statistics or call.shard is not None


class Cut(NamedTuple):
    """How tokens are cut into chunks."""

    rows: int  # of a chunk
    first: int = 0  # rows of one chunk before all others, which is stored in the gradient's memory
    width: int = 0  # columns of one of its blocks

    @classmethod
    def of(cls, tokens: int, hidden_size: int, vocabulary: int, call: HeadCall, gradient_bytes: int) -> "Cut":
        """Return the cut into the fewest chunks, and of two the one that needs less memory, within the call's budget.

        ``gradient_bytes``: of an entry of the weight's gradient; zero if it is not wanted.
        """
        itemsize = call.compute_dtype.itemsize
        rows_of_gradient = 4 if call.wanted.hidden and call.shard is None else 6
        of_row = rows_of_gradient * hidden_size + (12 if has_dots(call) else 8) * tiles_of(vocabulary)
        stored_row = itemsize * padded(vocabulary)
        # cuBLAS's product with the weight takes 5 to 8 % longer at these hidden sizes for an odd number of tiles.
        tile = 2 * TILE_ROWS if hidden_size % 2048 == 0 else TILE_ROWS
        plain = cls(chunk_rows(tokens, stored_row + of_row, call.budget_mib, call.options.chunk_size, tile=tile))
        count = -(-tokens // plain.rows)

        first = min(tokens, hidden_size * gradient_bytes // itemsize // tile * tile)
        left, rest = call.budget_mib * MIB - first * of_row, tokens - first
        fits = 0 < first * stored_row <= left * MOST_BLOCKS
        if call.options.chunk_size is not None or count == 1 or not fits:
            return plain
        rows = chunk_rows(rest, stored_row, left / MIB, tile=tile, most=plain.rows) if rest else 0
        of_column = itemsize * first  # of the first chunk
        width = max(rows * stored_row / of_column, vocabulary / BLOCKS)
        width = max(min(in_tiles(width), int(left / of_column) // TILE_COLUMNS * TILE_COLUMNS), TILE_COLUMNS)
        width = in_tiles(vocabulary / -(-vocabulary // width))  # evened out
        memory = max(rows * stored_row, width * of_column) + max(first, rows) * of_row
        chunk_count = 1 + (-(-rest // rows) if rest else 0)
        if rows * stored_row <= left and (chunk_count, memory) < (count, plain.rows * (stored_row + of_row)):
            return cls(rows, first, width)
        return plain


def in_tiles(columns: float) -> int:
    """Return the columns of as many whole tiles as have them."""
    return math.ceil(columns / TILE_COLUMNS) * TILE_COLUMNS


class Block(NamedTuple):
    """Some columns of a chunk's numerators."""

    columns: slice
    numerators_CB: Tensor


class RowSums:
    """Computes each row's sums, by tiles or other parts of it, chunk by chunk."""

    def chunks(self) -> Iterable[slice]:
        """Return the tokens of each chunk."""
        raise NotImplementedError

    def compute(self, chunk: slice, shift_N: Tensor) -> PartialSums:
        """Return the sums of the chunk's rows."""
        raise NotImplementedError

    def unify(self, chunk: slice, partial: PartialSums, logits_C: Tensor) -> None:
        """Bring what is stored of the chunk to the final shifts."""


class Numerators(RowSums):
    """Computes numerators chunk by chunk into one buffer, or only their sums into none."""

    def __init__(
        self, own: Inputs, call: HeadCall, kernels: Any, cut: Cut, *, stored: bool, gradient_VD: Tensor | None = None
    ) -> None:
        """``gradient_VD``: of the weight, whose memory has room for the first chunk until it is written."""
        self.own, self.options, self.kernels, self.stored, self.cut = own, call.options, kernels, stored, cut
        tokens, vocabulary = len(own.hidden_ND), len(own.weight_VD)
        rows = min(tokens, cut.rows)
        length = max(rows * padded(vocabulary), cut.first * cut.width) if stored else 0
        self.buffer = own.hidden_ND.new_empty(length)
        self.gradient = self.buffer if gradient_VD is None else gradient_VD.view(-1).view(self.buffer.dtype)
        kinds = {"dots": has_dots(call), "places": call.top1}
        self.partial = PartialSums.empty(tiles_of(vocabulary), max(rows, cut.first), own.hidden_ND, **kinds)

    def chunks(self) -> list[slice]:
        first, tokens = self.cut.first, len(self.own.hidden_ND)
        return [slice(0, first)] * (first > 0) + chunks(slice(first, tokens), self.cut.rows)

    def blocks(self, chunk: slice) -> list[Block]:
        """Return the chunk's numerators, until another chunk's are computed or the weight's gradient is written."""
        rows, vocabulary = chunk.stop - chunk.start, len(self.own.weight_VD)
        width = vocabulary if chunk.start or not self.cut.first else self.cut.width
        found, memory = [], self.buffer
        for start in range(0, vocabulary, max(width, 1)):
            columns = slice(start, min(start + width, vocabulary))
            length = padded(columns.stop - start)
            found.append(Block(columns, memory[: rows * length].view(rows, length)[:, : columns.stop - start]))
            memory = self.gradient[start * (self.gradient.numel() // vocabulary) :]
        return found

    def unify(self, chunk: slice, partial: PartialSums, logits_C: Tensor) -> None:
        if self.stored:
            for columns, numerators_CB in self.blocks(chunk):
                self.kernels.unify_shifts(numerators_CB, partial.of_columns(columns), logits_C)

    def compute(self, chunk: slice, shift_N: Tensor, *, partial_sums: bool = True, **more: Any) -> PartialSums:
        hidden_ND, weight_VD, bias_V, targets_N = self.own
        partial = self.partial.of(chunk.stop - chunk.start)
        nowhere = [(slice(0, len(weight_VD)), None)]
        for columns, numerators_CB in self.blocks(chunk) if self.stored else nowhere:
            of_block = partial.of_columns(columns)
            targets_C = targets_N[chunk] - columns.start if columns.start else targets_N[chunk]
            bias_B = None if bias_V is None else bias_V[columns]
            self.kernels.numerators(
                Inputs(hidden_ND[chunk], weight_VD[columns], bias_B, targets_C),
                shift_N[chunk],
                numerators_CB,
                of_block if partial_sums else None,
                self.options,
                **more,
            )
            if of_block.places_TC is not None and columns.start:
                of_block.places_TC.add_(columns.start)
        return partial


def chosen_columns(blocks: Sequence[Block], entries_F: Tensor) -> Tensor:
    """Return (C, F), the numerators of some entries of the vocabulary."""
    columns, found_CF = blocks[0].columns, blocks[0].numerators_CB
    if len(blocks) == 1:
        return found_CF.index_select(1, entries_F)
    found_CF = found_CF.index_select(1, entries_F.clamp(max=columns.stop - 1))
    for columns, numerators_CB in blocks[1:]:
        place_F = (entries_F - columns.start).clamp(0, numerators_CB.shape[1] - 1)
        found_CF = torch.where(entries_F >= columns.start, numerators_CB.index_select(1, place_F), found_CF)
    return found_CF
