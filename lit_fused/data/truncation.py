"""Decide what becomes of documents that are longer than a block where only some tokens are learned."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from lit_fused.data.source import DocumentError
from lit_fused.data.store import Encoded
from lit_fused.errors import UserError

TooLong = Literal["cut", "skip", "refuse"]


def check_too_long(value: object) -> None:
    """Raise ``UserError`` unless ``value`` is one of ``TooLong``."""
    if value not in get_args(TooLong):
        raise UserError(f"data.too_long must be one of {', '.join(get_args(TooLong))}; got {value!r}")


def leave_out(note: str) -> Encoded:
    """Return a document without tokens, which the preparation leaves out and counts."""
    return Encoded(np.empty(0, np.int64), np.empty(0, np.bool_), (note,))


def is_left_out(length: int, block_size: int, too_long: TooLong) -> Encoded | None:
    """Return what replaces a document of ``length`` tokens; None if it is kept, perhaps cut.

    Raises:
        DocumentError: It is longer than a block, and ``too_long`` is "refuse".
    """
    if length > block_size and too_long == "refuse":
        raise DocumentError(
            f"it has {length:,} tokens, more than data.block_size={block_size}; set data.too_long=cut or "
            "skip, or a larger data.block_size"
        )
    if length > block_size and too_long == "skip":
        return leave_out(f"left out: longer than data.block_size={block_size}")
    return None


def fit_block(document: Encoded, block_size: int, too_long: TooLong) -> Encoded:
    """Return ``document`` if it has at most ``block_size`` tokens and loss is wanted on one that is not the first.

    A longer one is cut after ``block_size`` tokens ("cut"), left out ("skip"), or refused ("refuse"). One without
    loss is left out. Notes say so.
    """
    tokens, wanted, notes = document.tokens, document.wanted, document.notes
    assert wanted is not None
    if left_out := is_left_out(len(tokens), block_size, too_long):
        return left_out
    if len(tokens) > block_size:
        tokens, wanted, notes = tokens[:block_size], wanted[:block_size], (*notes, f"cut to {block_size} tokens")
        if not wanted[1:].any():
            return leave_out(f"left out: no answer begins within data.block_size={block_size} tokens")
    if not wanted[1:].any():
        return leave_out("left out: no answer")
    return Encoded(tokens, wanted, notes)


def join(parts: Sequence[Encoded], notes: tuple[str, ...] = ()) -> Encoded:
    """Join several documents of one record, each with ``wanted``, in one :class:`Encoded`."""
    if len(parts) == 1:
        return replace(parts[0], notes=(*notes, *parts[0].notes))
    kept = [part for part in parts if len(part.tokens)]
    tokens = np.concatenate([part.tokens for part in parts])
    wanted = np.concatenate([part.wanted for part in parts if part.wanted is not None])
    ends = tuple(np.cumsum([len(part.tokens) for part in kept]).tolist())
    return Encoded(tokens, wanted, (*notes, *(note for part in parts for note in part.notes)), ends)
