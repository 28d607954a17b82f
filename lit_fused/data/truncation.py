"""Documents that are longer than a block, where only some tokens are wanted."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from lit_fused.data.encoding import DocumentError
from lit_fused.data.store import Encoded
from lit_fused.errors import UserError

TooLong = Literal["cut", "skip", "refuse"]


def check_too_long(value: object) -> None:
    if value not in get_args(TooLong):
        raise UserError(f"data.too_long must be one of {', '.join(get_args(TooLong))}; got {value!r}")


def fit_block(document: Encoded, block_size: int, too_long: TooLong) -> Encoded:
    """``document`` if it has at most ``block_size`` tokens and loss is wanted on one that is not the first.

    A longer one is cut behind its first ``block_size`` tokens ("cut"), left out ("skip"), or is a fault ("refuse").
    One without loss is left out. Notes say so.
    """
    tokens, wanted, notes = document.tokens, document.wanted, document.notes
    assert wanted is not None
    if len(tokens) > block_size:
        if too_long == "refuse":
            raise DocumentError(
                f"it has {len(tokens):,} tokens, more than data.block_size={block_size}; set data.too_long=cut or "
                "skip, or a larger data.block_size"
            )
        if too_long == "skip":
            return _left_out(f"left out: longer than data.block_size={block_size}")
        tokens, wanted, notes = tokens[:block_size], wanted[:block_size], (*notes, f"cut to {block_size} tokens")
        if not wanted[1:].any():
            return _left_out(f"left out: no answer begins within data.block_size={block_size} tokens")
    if not wanted[1:].any():
        return _left_out("left out: no answer")
    return Encoded(tokens, wanted, notes)


def join(parts: Sequence[Encoded], notes: tuple[str, ...] = ()) -> Encoded:
    """Several documents of one record, each with ``wanted``, as one :class:`Encoded`."""
    if len(parts) == 1:
        return replace(parts[0], notes=(*notes, *parts[0].notes))
    kept = [part for part in parts if len(part.tokens)]
    tokens = np.concatenate([part.tokens for part in parts])
    wanted = np.concatenate([part.wanted for part in parts if part.wanted is not None])
    ends = tuple(np.cumsum([len(part.tokens) for part in kept]).tolist())
    return Encoded(tokens, wanted, (*notes, *(note for part in parts for note in part.notes)), ends)


def _left_out(note: str) -> Encoded:
    return Encoded(np.empty(0, np.int64), np.empty(0, np.bool_), (note,))
