"""Put preferences into batches: the two answers to a prompt as neighbouring rows, padded, or all in one row.

``padded``: a batch of n preferences has rows (2n, T), the chosen answer of each before the rejected one, and
"desirable" (2n,), 1 for chosen and 0 for rejected. ``packed``: all of them are one row (1, N) without padding, with
"position_ids" that begin anew with each, "lengths" (1, 2n) and "desirable" (1, 2n). Of a store in which every
preference is a single answer, each has one row, or one place in the row.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from lit_fused.data.loader import Collate
from lit_fused.data.packing import DocumentBlocks, PairRows, Rows, SingleDocuments, StreamBlocks, pad_documents
from lit_fused.data.store import Integers, TokenStore
from lit_fused.ops.label_checks import IGNORE_INDEX


class PreferenceRows(Rows):
    """Samples of ``packing=padded`` and ``packed``: "input_ids" and "labels" (n,) of all answers to a prompt, one after
    the other, with their "lengths" and "desirable" (1 or 2,), all int64."""

    unit = "preferences"

    def __init__(self, store: TokenStore, block_size: int, pad_token_id: int) -> None:
        super().__init__(store, block_size, pad_token_id)
        self.num_rows = store.num_documents // 2
        self._lengths_of_sides = store.lengths.reshape(-1, 2)
        self._exists = store.num_wanted.reshape(-1, 2) > 0
        self.are_single = not self._exists.all(1).any()

    def _row(self, index: int) -> dict[str, Tensor]:
        sides = [side for side in (0, 1) if self._exists[index, side] or not self.are_single]
        ends, lengths = self.store.ends[2 * index :], self._lengths_of_sides[index]
        parts = [self._read(int(ends[side] - lengths[side]), int(ends[side])) for side in sides]
        for _, labels in parts:
            labels[0] = IGNORE_INDEX
        tokens, labels = (torch.from_numpy(np.concatenate(column)) for column in zip(*parts, strict=True))
        row = {"input_ids": tokens, "labels": labels, "lengths": torch.from_numpy(lengths[sides])}
        return row | {"desirable": 1 - torch.tensor(sides)}

    def _lengths(self) -> list[Integers]:
        return [np.where(self._exists, self._lengths_of_sides, 0) if self.are_single else self._lengths_of_sides]


class PackedPreferenceRows(PreferenceRows):
    """Samples of ``packing=packed``."""

    share_of_tokens = 1.0


def pad_preferences(samples: list[dict[str, Tensor]], pad_token_id: int) -> dict[str, Tensor]:
    """Make a batch (answers, T), padded, with "attention_mask", and "desirable" and stored scores (answers,)."""
    rows = []
    for sample in samples:
        sides = [sample[name].split(sample["lengths"].tolist()) for name in ("input_ids", "labels")]
        rows += [{"input_ids": tokens, "labels": labels} for tokens, labels in zip(*sides, strict=True)]
    of_answers = [name for name in ("desirable", "reference_log_prob") if name in samples[0]]
    joined = {name: torch.cat([sample[name] for sample in samples]) for name in of_answers}
    return pad_documents(rows, pad_token_id) | joined


def pack_preferences(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Make a batch of one row of all answers, with "position_ids", and "lengths" and "desirable" (1, answers)."""
    row = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
    row["position_ids"] = torch.cat([torch.arange(length) for length in row["lengths"].tolist()])
    return {name: value[None] for name, value in row.items()}


ROWS: dict[str, type[Rows]] = {
    "stream": StreamBlocks,
    "documents": DocumentBlocks,
    "none": SingleDocuments,
    "pairs": PairRows,
    "padded": PreferenceRows,
    "packed": PackedPreferenceRows,
}


def collate_of(packing: str, pad_token_id: int) -> Collate | None:
    """Return what makes batches of the rows of a packing; None: they are stacked."""
    if packing == "packed":
        return pack_preferences
    pad = {"none": pad_documents, "pairs": pad_documents, "padded": pad_preferences}.get(packing)
    return pad and partial(pad, pad_token_id=pad_token_id)
