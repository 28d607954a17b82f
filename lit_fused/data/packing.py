"""Put documents of any length into rows: which document goes where, and what a sample then is.

``stream``: the documents, one after the other, are one stream of tokens; block ``b`` is its tokens
``[b * block_size, (b + 1) * block_size)``. Only the last block is padded. Documents in one block can attend to each
other.

``documents``: whole documents, as many as fit, share a block; they are placed by best-fit decreasing: the longest
first, each into the fullest block that still takes it. "position_ids" begin at 0 in each document; attention must not
cross these beginnings, and the first token of each document is no target.

``none``: one document a row, padded to the longest of the batch.

``pairs``: a source and a target a row, for encoder-decoders, each padded to the longest of the batch.

Labels are unshifted, and -100 on padding. N documents or pieces, B blocks, T block_size.
"""

from bisect import bisect_left, insort
from collections import defaultdict, deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from lit_fused.data.loader import pad_right
from lit_fused.data.tokens import Integers, Tokens
from lit_fused.ops.label_checks import IGNORE_INDEX


def cut_documents(ends: Integers, block_size: int) -> tuple[Integers, Integers]:
    """Cut documents into pieces of at most ``block_size`` tokens, without those of one, which predict nothing; return
    their starts and lengths, each (N,). ``ends`` (D,) is the index after each document's last token."""
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
    """Pack pieces of ``lengths`` (N,), each from 1 to ``block_size``, into few blocks by best-fit decreasing. Return
    ``(order (N,), ends (B,))``, always the same: block b holds the pieces ``order[ends[b - 1] : ends[b]]``."""
    longest_first = np.argsort(-lengths, kind="stable")
    block_of = np.empty(len(lengths), np.int64)  # the block of each piece, longest first
    rooms: list[int] = []  # the different amounts of room that blocks have left, ascending
    blocks: dict[int, deque[int]] = defaultdict(deque)  # the blocks by the room that is left in them
    num_blocks = 0
    for place, length in enumerate(lengths[longest_first].tolist()):
        index = bisect_left(rooms, length)
        if index == len(rooms):
            room, block, num_blocks = block_size, num_blocks, num_blocks + 1
        else:
            room = rooms[index]
            block = blocks[room].popleft()
            if not blocks[room]:
                del rooms[index]
        block_of[place] = block
        if not blocks[room - length]:
            insort(rooms, room - length)
        blocks[room - length].append(block)
    by_block = np.argsort(block_of, kind="stable")
    return longest_first[by_block], np.cumsum(np.bincount(block_of, minlength=num_blocks))


class Rows(Dataset[dict[str, Tensor]]):
    """Samples of tokens, by their numbers.

    Attributes:
        share_of_tokens: Of all positions; None where it depends on which rows are in a batch.
        weight: A factor on the weights of the tokens' loss, which samples then have as "token_weights", float32; None:
            they have none.
    """

    num_rows: int
    share_of_tokens: float | None = None
    weight: float | None = None

    def __init__(self, store: Tokens, block_size: int, pad_token_id: int) -> None:
        self.store, self.block_size, self.pad_token_id = store, block_size, pad_token_id

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)  # ends a loop over a dataset
        return self._row(index)

    def _row(self, index: int) -> dict[str, Tensor]:
        raise NotImplementedError

    def _read(self, start: int, stop: int) -> tuple[Integers, Integers]:
        """Return (tokens, labels), both (n,)."""
        tokens, loss_mask = self.store.read(start, stop)
        return tokens, tokens.copy() if loss_mask is None else np.where(loss_mask, tokens, IGNORE_INDEX)

    def _weights(self, start: int, stop: int) -> dict[str, Tensor]:
        if self.weight is None:
            return {}
        return {"token_weights": torch.from_numpy(self.store.weights(start, stop)) * self.weight}

    def _block(self, row: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a row padded to ``block_size``."""
        fills = {"input_ids": self.pad_token_id, "labels": IGNORE_INDEX, "token_weights": 0}
        return {name: F.pad(row[name], (0, self.block_size - len(row[name])), value=fills[name]) for name in row}


def _sample(tokens: Integers, labels: Integers) -> dict[str, Tensor]:
    return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}


class StreamBlocks(Rows):
    """Samples of ``packing=stream``: "input_ids" and "labels", int64 (T,); only the last block is padded."""

    def __init__(self, store: Tokens, block_size: int, pad_token_id: int) -> None:
        super().__init__(store, block_size, pad_token_id)
        self.num_rows = -(-store.num_tokens // block_size)
        self.share_of_tokens = store.num_tokens / (max(self.num_rows, 1) * block_size)

    def _row(self, index: int) -> dict[str, Tensor]:
        start = index * self.block_size
        stop = start + self.block_size
        return self._block(_sample(*self._read(start, stop)) | self._weights(start, stop))


class SingleDocuments(Rows):
    """Samples of ``packing=none``: "input_ids" and "labels" of one document, int64 (n,), cut to a block's length,
    without single tokens; see :func:`pad_documents`."""

    def __init__(self, store: Tokens, block_size: int, pad_token_id: int) -> None:
        super().__init__(store, block_size, pad_token_id)
        self.starts, self.lengths = cut_documents(store.ends, block_size)
        self.num_rows = len(self.starts)

    def _row(self, index: int) -> dict[str, Tensor]:
        """Return a piece, whose first token is no target."""
        start = int(self.starts[index])
        stop = start + int(self.lengths[index])
        tokens, labels = self._read(start, stop)
        labels[0] = IGNORE_INDEX
        return _sample(tokens, labels) | self._weights(start, stop)


class DocumentBlocks(SingleDocuments):
    """Samples of ``packing=documents``: also "position_ids", int64 (T,), from 0 in each document and the padding."""

    def __init__(self, store: Tokens, block_size: int, pad_token_id: int) -> None:
        super().__init__(store, block_size, pad_token_id)
        self.order, self.ends = best_fit(self.lengths, block_size)
        self.num_rows = len(self.ends)
        self.share_of_tokens = int(self.lengths.sum()) / (self.num_rows * block_size)

    def _row(self, index: int) -> dict[str, Tensor]:
        pieces = [*map(super()._row, self.order[self.ends[index - 1] if index else 0 : self.ends[index]])]
        lengths = [len(piece["input_ids"]) for piece in pieces]
        positions = [torch.arange(length) for length in (*lengths, self.block_size - sum(lengths))]
        row = self._block({name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]})
        return row | {"position_ids": torch.cat(positions)}


class PairRows(Rows):
    """Samples of ``packing=pairs``: "labels", int64 (t,), the wanted tokens of a stored document, are the target, and
    "input_ids", int64 (s,), those before them, the source."""

    def __init__(self, store: Tokens, block_size: int, pad_token_id: int) -> None:
        super().__init__(store, block_size, pad_token_id)
        self.num_rows = store.num_documents

    def _row(self, index: int) -> dict[str, Tensor]:
        end = int(self.store.ends[index])
        start = end - int(self.store.lengths[index])
        tokens, loss_mask = self.store.read(start, end)
        assert loss_mask is not None
        weights = {name: values[torch.from_numpy(loss_mask)] for name, values in self._weights(start, end).items()}
        return _sample(tokens[~loss_mask], tokens[loss_mask]) | weights


def pad_documents(samples: list[dict[str, Tensor]], pad_token_id: int) -> dict[str, Tensor]:
    """Make a batch of samples of any length: "input_ids", "labels" and "attention_mask", int64. Inputs, with their
    mask, and labels are padded each to their longest, and so are stored scores (T, ...) of samples that have them."""
    return pad_right([row | {"attention_mask": torch.ones_like(row["input_ids"])} for row in samples], pad_token_id)
