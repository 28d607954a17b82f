"""From documents of any length to blocks of one length: which document goes where, and what a sample then is.

``stream``: the documents, one after the other, are one stream of tokens; block ``b`` is its tokens
``[b * block_size, (b + 1) * block_size)``. No position is empty but in the last block, and documents see each other.

``documents``: whole documents, as many as fit, in blocks by best-fit decreasing: the longest first, each into the
fullest block that still takes it. Which document came from where is told by "position_ids", which begin at 0 in each;
attention must not cross these beginnings, and the first token of each is no target. The one trick: what matters of a
block is how much room is left, a number up to ``block_size``. So blocks with the same room are one group, documents of
one length go into a group's blocks together, and N documents take N log N for the sort and far fewer than N steps for
the rest.

``none``: one document a row, padded to the longest of the batch.

Labels are unshifted, and -100 on padding: by position, not by the padding token's number, so that they are right
whatever the text contains.

N documents or pieces, B blocks, T block_size.
"""

from abc import abstractmethod
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lit_fused.errors import UserError

IGNORE_INDEX = -100


def pack_tokens(
    tokens: npt.NDArray[np.int32], block_size: int, pad_token_id: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Pack ``tokens`` ``(N,)`` into ``input_ids`` and ``labels``, both int32 ``(B, block_size)``.

    ``B = ceil(N / block_size)``. Labels are unshifted: equal to ``input_ids``, except -100 on the last block's padding.
    """
    num_blocks = -(-len(tokens) // block_size)
    input_ids = np.full(num_blocks * block_size, pad_token_id, dtype=np.int32)
    labels = np.full(num_blocks * block_size, IGNORE_INDEX, dtype=np.int32)
    input_ids[: len(tokens)] = tokens
    labels[: len(tokens)] = tokens
    return input_ids.reshape(num_blocks, block_size), labels.reshape(num_blocks, block_size)


Integers = npt.NDArray[np.int64]


def cut_documents(ends: Integers, block_size: int) -> tuple[Integers, Integers]:
    """The pieces of at most ``block_size`` tokens that documents are cut into: ``(starts (N,), lengths (N,))``.

    A piece of a single token is left out: nothing in it predicts, and nothing before it may.

    Args:
        ends: (D,) the token at which each document ends, and the next one begins.
        block_size: tokens.
    """
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    lengths = ends - starts
    pieces = -(-lengths // block_size)
    if pieces.size and pieces.max() > 1:
        before = np.cumsum(pieces) - pieces  # of the document, in all
        within = np.arange(pieces.sum()) - np.repeat(before, pieces)
        starts = np.repeat(starts, pieces) + within * block_size
        lengths = np.minimum(np.repeat(ends, pieces) - starts, block_size)
    kept = lengths > 1
    return starts[kept], lengths[kept]


def best_fit(lengths: Integers, block_size: int) -> tuple[Integers, Integers]:
    """Best-fit decreasing: put pieces into as few blocks as it finds.

    Args:
        lengths: (N,) tokens of each piece, from 1 to ``block_size``.
        block_size: tokens of a block.

    Returns:
        ``(order (N,), ends (B,))``: block b holds the pieces ``order[ends[b - 1] : ends[b]]``. Ties go by the order
        given, so that the same lengths always give the same blocks.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    block_of = np.empty(len(lengths), np.int64)  # of the pieces, longest first
    rooms: list[int] = []  # that some blocks have left, ascending
    blocks: dict[int, list[Integers]] = {}  # by the room that is left in them
    num_blocks = placed = 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            index = bisect_left(rooms, length)
            if index < len(rooms):
                room = rooms.pop(index)
                group = _joined(blocks.pop(room))
            else:  # new blocks, for all that is left of this length
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
            if rest:  # the last pieces of this length do not fill a block with as many as it takes
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
