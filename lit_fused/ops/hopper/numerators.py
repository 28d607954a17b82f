"""The memory of ``hopper_path``'s numerators, and the chunks into which tokens are cut for it.

A chunk's numerators are C x V numbers in bfloat16. The gradient of the weight, V x D, is written when they are all
known, so until then its memory has room for those of D tokens, or of 2 D where it is float32. So the first chunk is
larger than the others by about as many rows. It is stored in blocks of columns: the first one in the chunks' own
memory, the others one after another in the gradient's. The gradient is then written from the last block to the first,
and each block ends before the rows of the gradient that belong to it, so that a product overwrites only what has been
read.

B block of columns, C chunk, D hidden, F some entries, N tokens, R rows of a first or of another chunk, T tiles, V
vocabulary.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_fused.ops.chunks import MIN_CHUNK_ROWS, TILE_ROWS, chunk_rows, chunks
from lit_fused.ops.hopper.hopper_rows import TILE_COLUMNS, PartialSums, tiles_of
from lit_fused.ops.kernel_path import HeadCall, Inputs
from lit_fused.ops.products import padded

MIB = 2**20
# Each block costs launches, and a pass over the product with the weight in float32. More of them have to save a chunk.
USUAL_BLOCKS, MOST_BLOCKS = 4, 8


class Sizes(NamedTuple):
    """Sizes on which a chunk's memory depends."""

    vocabulary: int
    hidden_size: int
    itemsize: int  # of a numerator
    capacity: int  # rows of numerators for which the weight's gradient has room
    row_bytes: int  # of a row beside its numerators

    @classmethod
    def of(cls, hidden_size: int, vocabulary: int, call: HeadCall, gradient_bytes: int) -> "Sizes":
        itemsize = call.compute_dtype.itemsize
        kinds = 2 + has_dots(call) + call.top1
        row_bytes = 4 * kinds * tiles_of(vocabulary) + hidden_size * (4 * call.wanted.hidden + itemsize * scales(call))
        return cls(vocabulary, hidden_size, itemsize, hidden_size * gradient_bytes // itemsize, row_bytes + 4)

    @property
    def whole_row_bytes(self) -> int:
        return self.itemsize * padded(self.vocabulary) + self.row_bytes


class Cut(NamedTuple):
    """How tokens are cut into chunks."""

    rows: int  # of a chunk
    first: int = 0  # rows of one chunk before all others, of which a part is stored in the gradient's memory
    starts: tuple[int, ...] = ()  # of its blocks of columns

    @classmethod
    def of(cls, tokens: int, sizes: Sizes, budget_mib: float, chunk_size: int | None) -> "Cut":
        """Return the cut into the fewest chunks, and of these the one that needs the least memory."""
        # cuBLAS's product with the weight takes 5 to 8 % longer at these hidden sizes for an odd number of tiles.
        tile = 2 * TILE_ROWS if sizes.hidden_size % 2048 == 0 else TILE_ROWS
        plain = cls(chunk_rows(tokens, sizes.whole_row_bytes, budget_mib, chunk_size, tile=tile))
        if chunk_size is not None or tokens <= MIN_CHUNK_ROWS or not sizes.capacity:
            return plain
        return _with_a_first_chunk(tokens, sizes, budget_mib, tile, plain)


@lru_cache(maxsize=256)
def _with_a_first_chunk(tokens: int, sizes: Sizes, budget_mib: float, tile: int, plain: Cut) -> Cut:
    """Return the cut with a first chunk apart, or the plain one where it saves no chunk."""
    half = -(-tokens // (2 * tile)) * tile
    largest = max(min(int(budget_mib * MIB / sizes.whole_row_bytes), half) // tile, 1) * tile
    few, many = (_count(tokens, largest, tile, sizes, blocks) for blocks in (USUAL_BLOCKS, MOST_BLOCKS))
    count, blocks = (few, USUAL_BLOCKS) if few <= many else (many, MOST_BLOCKS)
    low, rows = MIN_CHUNK_ROWS - tile, largest  # the fewest rows that need no more chunks
    while rows - low > tile:
        middle = (low + rows) // (2 * tile) * tile
        low, rows = (low, middle) if _count(tokens, middle, tile, sizes, blocks) <= count else (middle, rows)
    # Without one there are fewer products, and each is as fast.
    if count >= -(-tokens // plain.rows) or (rows < MIN_CHUNK_ROWS and count > 1):
        return plain
    first = min(tokens, -(-(tokens - (count - 1) * rows) // tile) * tile)
    return Cut(rows, first, _starts(first, rows, sizes, blocks))


def _count(tokens: int, rows: int, tile: int, sizes: Sizes, blocks: int) -> int:
    """Return the chunks, if one of up to ``rows`` rows has memory of its own and the first one has the most."""
    if _starts(tokens, rows, sizes, blocks):
        return 1
    low, high = 0, -(-tokens // tile)  # tiles of the first chunk
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _starts(middle * tile, rows, sizes, blocks) else (low, middle)
    return 1 + -(-(tokens - low * tile) // rows)


def _starts(first: int, rows: int, sizes: Sizes, most: int) -> tuple[int, ...]:
    """Return where blocks of a first chunk begin beside the memory of ``rows`` rows; empty if more would be needed."""
    own = (rows * sizes.whole_row_bytes - first * sizes.row_bytes) // (sizes.itemsize * first)
    own = own // TILE_COLUMNS * TILE_COLUMNS
    starts, end = [0], own
    while end < sizes.vocabulary:
        # (end - own + width) columns of numerators end before the gradient's row ``end``.
        width = (own * first - end * (first - sizes.capacity)) // first // TILE_COLUMNS * TILE_COLUMNS
        if width <= 0 or own <= 0 or len(starts) == most:
            return ()
        starts.append(end)
        end += width
    return tuple(starts)


def has_dots(call: HeadCall) -> bool:
    """Return whether a tile's sums have a third kind, which ranks always exchange."""
    return call.options.statistics or call.shard is not None


def scales(call: HeadCall) -> bool:
    """Return whether a chunk's scaled hidden states need memory: rows of their gradient, written later, are as large
    if they have the same dtype."""
    return call.wanted.weight and not (call.wanted.hidden and call.shard is None)


class Block(NamedTuple):
    """Some columns of a chunk's numerators."""

    columns: slice
    numerators_CB: Tensor


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

    def unify(self, chunk: slice, partial: PartialSums, logits_C: Tensor) -> None:
        """Bring what is stored of the chunk to the final shifts."""


Plan = list[tuple[tuple[int, ...], torch.dtype]]


class Room(NamedTuple):
    """The memory of a chunk of up to R rows."""

    numerators: Tensor
    partial: PartialSums
    product_RD: Tensor  # numerators @ weight, float32
    scaled_RD: Tensor  # hidden states times the factors of their rows


class Numerators(RowSums):
    """Computes numerators chunk by chunk into one piece of memory, or only their sums."""

    blocks: list[Block]  # of the last chunk, until the weight's gradient is written
    room: Room

    def __init__(
        self, own: Inputs, call: HeadCall, kernels: Any, cut: Cut, *, stored: bool, gradient_VD: Tensor | None = None
    ) -> None:
        """``gradient_VD``: of the weight, in whose memory a first chunk lies until it is written."""
        self.own, self.call, self.kernels, self.stored, self.cut = own, call, kernels, stored, cut
        self.rows = min(len(own.hidden_ND), cut.rows)
        first, other = self._plan(cut.first, cut.starts), self._plan(self.rows)
        needed = max(sum(_aligned(size, dtype) for size, dtype in plan) for plan in (first, other))
        self.memory = own.hidden_ND.new_empty(needed, dtype=torch.uint8)
        self.room = self._room(first if cut.first else other)
        dtype = own.hidden_ND.dtype
        self.gradient = self.room.numerators if gradient_VD is None else gradient_VD.view(-1).view(dtype)

    def _plan(self, rows: int, starts: tuple[int, ...] = ()) -> Plan:
        """Return the sizes and dtypes of what a chunk of so many rows needs, in :class:`Room`'s order."""
        hidden_size, vocabulary, call = self.own.hidden_ND.shape[1], len(self.own.weight_VD), self.call
        columns = padded(vocabulary) if len(starts) < 2 else min(starts[1], padded(vocabulary))
        tiles, stored = tiles_of(vocabulary), self.stored
        dtype = self.own.hidden_ND.dtype
        return [
            ((rows * columns * stored,), dtype),
            ((tiles, rows), torch.float32),
            ((tiles, rows), torch.float32),
            ((tiles * has_dots(call), rows), torch.float32),
            ((rows,), torch.float32),
            ((tiles * call.top1, rows), torch.int32),
            ((rows * stored * call.wanted.hidden, hidden_size), torch.float32),
            ((rows * stored * scales(call), hidden_size), dtype),
        ]

    def _room(self, plan: Plan) -> Room:
        parts, begin = [], 0
        for size, dtype in plan:
            part = self.memory[begin : begin + math.prod(size) * dtype.itemsize]
            parts.append(part.view(dtype).view(size))
            begin += _aligned(size, dtype)
        numerators, maxima, sums, dots, shifts, places, product, scaled = parts
        partial = PartialSums(
            maxima, sums, dots if has_dots(self.call) else None, shifts, places if self.call.top1 else None
        )
        return Room(numerators, partial, product, scaled)

    def chunks(self) -> list[slice]:
        first, tokens = self.cut.first, len(self.own.hidden_ND)
        return [slice(0, first)] * (first > 0) + chunks(slice(first, tokens), self.rows)

    def _blocks_of(self, chunk: slice) -> list[Block]:
        rows, vocabulary = chunk.stop - chunk.start, len(self.own.weight_VD)
        starts = self.cut.starts if self.cut.first and not chunk.start else (0,)
        starts = [start for start in starts if start < vocabulary] or [0]
        found, memory = [], self.room.numerators
        for start, stop in zip(starts, [*starts[1:], vocabulary], strict=True):
            width = padded(stop - start)
            length = rows * width
            found.append(Block(slice(start, stop), memory[:length].view(rows, width)[:, : stop - start]))
            memory = memory[length:] if start else self.gradient
        return found

    def unify(self, chunk: slice, partial: PartialSums, logits_C: Tensor) -> None:
        if self.stored:
            for columns, numerators_CB in self.blocks:
                self.kernels.unify_shifts(numerators_CB, partial.of_columns(columns), logits_C)

    def compute(self, chunk: slice, shift_N: Tensor, *, partial_sums: bool = True, **more: Any) -> PartialSums:
        if self.cut.first and chunk.start == self.cut.first:
            self.room = self._room(self._plan(self.rows))
        hidden_ND, weight_VD, bias_V, targets_N = self.own
        partial = self.room.partial.of(chunk.stop - chunk.start)
        self.blocks, nowhere = self._blocks_of(chunk) if self.stored else [], [(slice(0, len(weight_VD)), None)]
        for columns, numerators_CB in self.blocks or nowhere:
            of_block = partial.of_columns(columns)
            targets_C = targets_N[chunk] - columns.start if columns.start else targets_N[chunk]
            bias_B = None if bias_V is None else bias_V[columns]
            self.kernels.numerators(
                Inputs(hidden_ND[chunk], weight_VD[columns], bias_B, targets_C),
                shift_N[chunk],
                numerators_CB,
                of_block if partial_sums else None,
                self.call.options,
                **more,
            )
        return partial


def _aligned(size: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(size) * dtype.itemsize // 256) * 256


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
