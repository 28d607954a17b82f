"""Put preferences into batches: the two answers to a prompt as neighbouring rows, padded, or all in one row.

``padded``: a batch of n preferences has rows (2n, T), the chosen answer of each before the rejected one, and
"desirable" (2n,), 1 for chosen and 0 for rejected. ``packed``: all of them are one row (1, N) without padding, with
"position_ids" that begin anew with each, "lengths" (1, 2n) and "desirable" (1, 2n). Of a store in which every
preference is a single answer, each has one row, or one place in the row.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_fused.data.packing import DocumentBlocks, PadRight, PairRows, Rows, SingleDocuments, StreamBlocks
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


class PadPreferences(PadRight):
    """Make a batch (answers, T), padded, with "attention_mask", and "desirable" and stored scores (answers,)."""

    def __call__(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        rows = []
        for sample in samples:
            sides = [sample[name].split(sample["lengths"].tolist()) for name in ("input_ids", "labels")]
            rows += [{"input_ids": tokens, "labels": labels} for tokens, labels in zip(*sides, strict=True)]
        of_answers = [name for name in ("desirable", "reference_log_prob") if name in samples[0]]
        return super().__call__(rows) | {name: torch.cat([sample[name] for sample in samples]) for name in of_answers}


class PackPreferences(PadRight):
    """Make a batch of one row of all answers, with "position_ids", and "lengths" and "desirable" (1, answers)."""

    def __call__(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
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
COLLATE: dict[str, Callable[[int], Callable[[list[Any]], Any]]] = {
    "none": PadRight,
    "pairs": PadRight,
    "padded": PadPreferences,
    "packed": PackPreferences,
}
