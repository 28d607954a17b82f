"""Put preferences into batches: the two answers to a prompt as neighbouring rows, padded, or all in one row.

``padded``: a batch of n preferences has rows (2n, T), the chosen answer of each before the rejected one, and
"desirable" (2n,), 1 for chosen and 0 for rejected. ``packed``: all of them are one row (1, N) without padding, with
"position_ids" that begin anew with each, "lengths" (1, 2n) and "desirable" (1, 2n). Of a store in which every
preference is a single answer, each has one row, or one place in the row, and beside it, as "other_input_ids" and so
on, its prompt with the answer of the preference before it in the set.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from lit_fused.data.loader import Collate
from lit_fused.data.packing import DocumentBlocks, PairRows, Rows, SingleDocuments, StreamBlocks, pad_documents
from lit_fused.data.tokens import Integers, Tokens
from lit_fused.ops.label_checks import IGNORE_INDEX

_STORED = ("reference_log_prob", "other_reference_log_prob")  # of stored_scores.py


class PreferenceRows(Rows):
    """Samples of ``packing=padded`` and ``packed``: "input_ids" and "labels" (n,) of all answers to a prompt, one after
    the other, with their "lengths" and "desirable" (1 or 2,), all int64; of single answers also the "other" ones."""

    def __init__(self, store: Tokens, block_size: int, pad_token_id: int) -> None:
        super().__init__(store, block_size, pad_token_id)
        self.num_rows = store.num_documents // 2
        self._exists = store.num_wanted.reshape(-1, 2) > 0
        self.are_single = not self._exists.all(1).any()

    def _row(self, index: int) -> dict[str, Tensor]:
        sides = [side for side in (0, 1) if self._exists[index, side] or not self.are_single]
        answers = [self._answer(index, side) for side in sides]
        row = _sample(answers) | {"desirable": 1 - torch.tensor(sides)}
        if self.are_single:
            row |= {f"other_{name}": values for name, values in self._other(index, *answers[0]).items()}
        return row

    def _answer(self, index: int, side: int) -> tuple[Integers, Integers]:
        """Return the token ids and the labels of a prompt with one of its answers."""
        document = 2 * index + side
        end = int(self.store.ends[document])
        tokens, labels = self._read(end - int(self.store.lengths[document]), end)
        labels[0] = IGNORE_INDEX
        return tokens, labels

    def _other(self, index: int, tokens: Integers, labels: Integers) -> dict[str, Tensor]:
        """Return a single preference's prompt with the answer of the one before it, of at most ``block_size`` tokens;
        without labels if there is no other one."""
        before = (index - 1) % self.num_rows
        others, targets = self._answer(before, int(self._exists[before].argmax()))
        prompt, _ = _place_of_answer(labels)
        begin, end = _place_of_answer(targets)
        answer = slice(begin, min(end, begin + self.block_size - prompt))
        targets = targets if before != index else np.full_like(targets, IGNORE_INDEX)
        ids = np.concatenate([tokens[:prompt], others[answer]])
        return _sample([(ids, np.concatenate([np.full(prompt, IGNORE_INDEX), targets[answer]]))])


def _sample(answers: list[tuple[Integers, Integers]]) -> dict[str, Tensor]:
    """Return tokens and labels of answers, one after the other, and their lengths."""
    tokens, labels = (torch.from_numpy(np.concatenate(column)) for column in zip(*answers, strict=True))
    return {"input_ids": tokens, "labels": labels, "lengths": torch.tensor([len(ids) for ids, _ in answers])}


def _place_of_answer(labels: Integers) -> tuple[int, int]:
    """Return where an answer begins, and ends behind its last label; both at the end of a row without labels."""
    wanted = np.flatnonzero(labels != IGNORE_INDEX)
    return (int(wanted[0]), int(wanted[-1]) + 1) if len(wanted) else (len(labels), len(labels))


def pad_preferences(samples: list[dict[str, Tensor]], pad_token_id: int) -> dict[str, Tensor]:
    """Make a batch (answers, T), padded, with "attention_mask", and "desirable" and stored scores (answers,)."""
    batch = {}
    for of in ("", "other_") if "other_input_ids" in samples[0] else ("",):
        rows = []
        for sample in samples:
            lengths = sample[f"{of}lengths"].tolist()
            sides = [sample[of + name].split(lengths) for name in ("input_ids", "labels")]
            rows += [{"input_ids": tokens, "labels": labels} for tokens, labels in zip(*sides, strict=True)]
        batch |= {of + name: values for name, values in pad_documents(rows, pad_token_id).items()}
    of_answers = [name for name in ("desirable", *_STORED) if name in samples[0]]
    return batch | {name: torch.cat([sample[name] for sample in samples]) for name in of_answers}


def pack_preferences(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Make a batch of one row of all answers, with "position_ids", and "lengths" and "desirable" (1, answers)."""
    row = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
    for name in [name for name in row if name.endswith("lengths")]:
        positions = torch.cat([torch.arange(length) for length in row[name].tolist()])
        row[name.replace("lengths", "position_ids")] = positions
    return {name: value[None] for name, value in row.items()}


ROWS: dict[str, type[Rows]] = {
    "stream": StreamBlocks,
    "documents": DocumentBlocks,
    "none": SingleDocuments,
    "pairs": PairRows,
    "padded": PreferenceRows,
    "packed": PreferenceRows,
}


def collate_of(packing: str, pad_token_id: int) -> Collate | None:
    """Return what makes batches of the rows of a packing; None: they are stacked."""
    if packing == "packed":
        return pack_preferences
    pad = {"none": pad_documents, "pairs": pad_documents, "padded": pad_preferences}.get(packing)
    return pad and partial(pad, pad_token_id=pad_token_id)
