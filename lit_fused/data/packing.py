"""Put documents of any length into rows: which document goes where, and what a sample then is.

``stream``: the documents, one after the other, are one stream of tokens; block ``b`` is its tokens
``[b * block_size, (b + 1) * block_size)``. Only the last block is padded. Documents in one block can attend to each
other.

``documents``: whole documents, as many as fit, share a block; they are placed by best-fit decreasing: the longest
first, each into the fullest block that still takes it. "position_ids" begin at 0 in each document; attention must not
cross these beginnings, and the first token of each document is no target. The placement is fast because only the room
left in a block matters, a number up to ``block_size``: blocks with the same room are one group, and documents of one
length go into a group's blocks together. N documents take N log N steps for the sort and far fewer than N for the rest.

``none``: one document a row, padded to the longest of the batch.

``pairs``: a source and a target a row, for encoder-decoders, each padded to the longest of the batch.

Labels are unshifted, and -100 on padding: by position, not by the padding token's number, so that they are right
whatever the text contains.

N documents or pieces, B blocks, T block_size.
"""

from bisect import bisect_left, insort
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lit_fused.data.store import TokenStore
from lit_fused.errors import UserError
from lit_fused.ops.label_checks import IGNORE_INDEX

Integers = npt.NDArray[np.int64]


def cut_documents(ends: Integers, block_size: int) -> tuple[Integers, Integers]:
    """Cut documents into pieces of at most ``block_size`` tokens. Return their starts and lengths, each (N,).

    A piece of a single token is left out: it has nothing to predict.

    Args:
        ends: (D,), the index of the token at which each document ends and the next one begins.
        block_size: Tokens.
    """
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    lengths = ends - starts
    pieces = -(-lengths // block_size)
    if pieces.size and pieces.max() > 1:
        before = np.cumsum(pieces) - pieces  # the number of pieces before each document
        within = np.arange(pieces.sum()) - np.repeat(before, pieces)
        starts = np.repeat(starts, pieces) + within * block_size
        lengths = np.minimum(np.repeat(ends, pieces) - starts, block_size)
    kept = lengths > 1
    return starts[kept], lengths[kept]


def best_fit(lengths: Integers, block_size: int) -> tuple[Integers, Integers]:
    """Pack pieces into few blocks by best-fit decreasing.

    Args:
        lengths: (N,), the tokens of each piece, from 1 to ``block_size``.
        block_size: The tokens of a block.

    Returns:
        ``(order (N,), ends (B,))``: block b holds the pieces ``order[ends[b - 1] : ends[b]]``. Ties are resolved by the
        given order, so that the same lengths always give the same blocks.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    block_of = np.empty(len(lengths), np.int64)  # the block of each piece, longest first
    rooms: list[int] = []  # the different amounts of room that blocks have left, ascending
    blocks: dict[int, list[Integers]] = {}  # the blocks by the room that is left in them
    num_blocks = placed = 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            index = bisect_left(rooms, length)
            if index < len(rooms):
                room = rooms.pop(index)
                group = _joined(blocks.pop(room))
            else:  # open new blocks for all that is left of this length
                room = block_size
                group = np.arange(num_blocks, num_blocks - (-count // (block_size // length)))
                num_blocks += len(group)
            each = room // length
            full, rest = divmod(count, each)
            used = min(full, len(group))
            block_of[placed : placed + used * each] = np.repeat(group[:used], each)
            placed, count = placed + used * each, count - used * each
            _put(rooms, blocks, room - each * length, group[:used])
            if used == len(group):
                continue
            if rest:  # the last pieces of this length leave room for more of them in their block
                block_of[placed : placed + rest] = group[used]
                placed, count = placed + rest, 0
                _put(rooms, blocks, room - rest * length, group[used : used + 1])
                used += 1
            _put(rooms, blocks, room, group[used:])
    by_block = np.argsort(block_of, kind="stable")
    return longest_first[by_block], np.cumsum(np.bincount(block_of, minlength=num_blocks))


def _joined(parts: list[Integers]) -> Integers:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _put(rooms: list[int], blocks: dict[int, list[Integers]], room: int, group: Integers) -> None:
    if not len(group):
        return
    if room in blocks:
        blocks[room].append(group)
    else:
        insort(rooms, room)
        blocks[room] = [group]


class StreamBlocks(Dataset[dict[str, Tensor]]):
    """Samples of ``packing=stream``: "input_ids" and "labels", int64 (T,); only the last block is padded."""

    def __init__(self, store: TokenStore, block_size: int, pad_token_id: int) -> None:
        self.store, self.block_size, self.pad_token_id = store, block_size, pad_token_id
        self.share_of_tokens = store.num_tokens / (max(len(self), 1) * block_size)

    def __len__(self) -> int:
        return -(-self.store.num_tokens // self.block_size)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        _check_index(index, len(self))
        start = index * self.block_size
        tokens, labels = _read(self.store, start, min(start + self.block_size, self.store.num_tokens))
        return _padded({"input_ids": (tokens, self.pad_token_id), "labels": (labels, IGNORE_INDEX)}, self.block_size)

    def summary(self) -> str:
        return f"{len(self):,} blocks of {self.block_size} hold {self.store.num_tokens:,} tokens"

    def share_of_tokens_in(self, order: Integers, batch_size: int) -> float:
        return self.share_of_tokens


class _Documents(Dataset[dict[str, Tensor]]):
    """Samples of whole documents. Documents longer than a block are cut, single tokens left out."""

    def __init__(self, store: TokenStore, block_size: int, pad_token_id: int) -> None:
        self.store, self.block_size, self.pad_token_id = store, block_size, pad_token_id
        self.starts, self.lengths = cut_documents(store.ends, block_size)
        if not len(self.starts):
            raise UserError(
                f"none of the {store.num_documents:,} documents has two tokens, one to read and one to predict; choose "
                "data.packing=stream, or give longer documents"
            )

    def _piece(self, index: int) -> tuple[Integers, Integers]:
        """Return (tokens, labels) of a piece, whose first token is no target."""
        start = int(self.starts[index])
        tokens, labels = _read(self.store, start, start + int(self.lengths[index]))
        labels[0] = IGNORE_INDEX
        return tokens, labels

    def _counts(self) -> str:
        words = f"{self.store.num_documents:,} documents"
        if len(self.starts) != self.store.num_documents:
            words += f", as {len(self.starts):,} pieces of 2 to {self.block_size} tokens"
        return f"{words}, {int(self.lengths.sum()):,} tokens"


class DocumentBlocks(_Documents):
    """Samples of ``packing=documents``: "input_ids", "labels" and "position_ids", int64 (T,).

    Positions begin at 0 in each document, and in the padding at the end of a block.
    """

    def __init__(self, store: TokenStore, block_size: int, pad_token_id: int) -> None:
        super().__init__(store, block_size, pad_token_id)
        self.order, self.ends = best_fit(self.lengths, block_size)
        self.share_of_tokens = int(self.lengths.sum()) / (len(self) * block_size)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        _check_index(index, len(self))
        pieces = self.order[self.ends[index - 1] if index else 0 : self.ends[index]]
        tokens, labels = zip(*map(self._piece, pieces), strict=True)
        lengths = [len(part) for part in tokens]
        room = self.block_size - sum(lengths)
        positions = np.concatenate([np.arange(length) for length in (*lengths, room)])
        return _padded(
            {
                "input_ids": (np.concatenate(tokens), self.pad_token_id),
                "labels": (np.concatenate(labels), IGNORE_INDEX),
                "position_ids": (positions, 0),
            },
            self.block_size,
        )

    def summary(self) -> str:
        return f"{len(self):,} blocks of {self.block_size} hold {self._counts()}"

    def share_of_tokens_in(self, order: Integers, batch_size: int) -> float:
        return self.share_of_tokens


class SingleDocuments(_Documents):
    """Samples of ``packing=none``: "input_ids" and "labels" of one document, int64 (n,); see :class:`PadRight`."""

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        _check_index(index, len(self))
        tokens, labels = self._piece(index)
        return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}

    def summary(self) -> str:
        return f"{len(self):,} rows hold {self._counts()}"

    def share_of_tokens_in(self, order: Integers, batch_size: int) -> float:
        """Return the share of the positions of padded batches that holds tokens; ``order`` is that of the rows."""
        return _share_in_batches([self.lengths], order, batch_size)


class PairRows(Dataset[dict[str, Tensor]]):
    """Samples of ``packing=pairs``: "input_ids", int64 (s,), and "labels", int64 (t,): a source and its target.

    The wanted tokens of a stored document are the target, and those before them the source.
    """

    def __init__(self, store: TokenStore, block_size: int, pad_token_id: int) -> None:
        self.store = store

    def __len__(self) -> int:
        return self.store.num_documents

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        _check_index(index, len(self))
        tokens, wanted = self.store.read(int(self.store.ends[index - 1]) if index else 0, int(self.store.ends[index]))
        assert wanted is not None
        return {"input_ids": torch.from_numpy(tokens[~wanted]), "labels": torch.from_numpy(tokens[wanted])}

    def summary(self) -> str:
        return f"{len(self):,} pairs hold {self.store.num_tokens:,} tokens"

    def share_of_tokens_in(self, order: Integers, batch_size: int) -> float:
        """Return the share of the positions of padded batches that holds tokens; ``order`` is that of the rows."""
        targets = self.store.num_wanted
        return _share_in_batches([self.store.lengths - targets, targets], order, batch_size)


Rows: TypeAlias = StreamBlocks | DocumentBlocks | SingleDocuments | PairRows
ROWS: dict[str, type[Rows]] = {
    "stream": StreamBlocks,
    "documents": DocumentBlocks,
    "none": SingleDocuments,
    "pairs": PairRows,
}  # by packing


class PadRight:
    """Make a batch of samples of any length: "input_ids", "labels" and "attention_mask", int64.

    Inputs, with their mask, and labels are padded each to their longest.
    """

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        inputs, labels = ([sample[name].numpy() for sample in samples] for name in ("input_ids", "labels"))
        columns = {
            "input_ids": (inputs, self.pad_token_id),
            "labels": (labels, IGNORE_INDEX),
            "attention_mask": ([np.ones_like(ids) for ids in inputs], 0),
        }
        return {name: _stacked(rows, fill) for name, (rows, fill) in columns.items()}


def _stacked(rows: list[Integers], fill: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.stack([_padded({"row": (row, fill)}, longest)["row"] for row in rows])


def _share_in_batches(lengths: list[Integers], order: Integers, batch_size: int) -> float:
    whole = len(order) // batch_size * batch_size
    batches = [column[order[:whole]].reshape(-1, batch_size) for column in lengths]
    positions = sum(int(batch.max(1).sum() * batch_size) for batch in batches)
    return sum(int(batch.sum()) for batch in batches) / max(positions, 1)


def _check_index(index: int, length: int) -> None:
    if not 0 <= index < length:
        raise IndexError(index)  # ends a loop over a dataset


def _read(store: TokenStore, start: int, stop: int) -> tuple[Integers, Integers]:
    """Return (tokens, labels), both (n,)."""
    tokens, wanted = store.read(start, stop)
    return tokens, tokens.copy() if wanted is None else np.where(wanted, tokens, IGNORE_INDEX)


def _padded(parts: dict[str, tuple[Integers, int]], length: int) -> dict[str, Tensor]:
    """Fill each array up to ``length`` with its number."""
    result = {}
    for name, (values, fill) in parts.items():
        full = np.full(length, fill, np.int64)
        full[: len(values)] = values
        result[name] = torch.from_numpy(full)
    return result
