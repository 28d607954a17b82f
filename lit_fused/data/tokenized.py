"""Turn records into tokens: train a tokenizer if none is given, and encode each record once.

The library's ``map`` encodes, in several processes where there is much to do, and keeps the result in its cache, beside
the records.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lit_fused.atomic import written_whole
from lit_fused.data.conversations import loss_weight
from lit_fused.data.encoding import Encoded, Encoding, leave_out
from lit_fused.data.split import Split
from lit_fused.data.tokenizer import tokenizer_digest, vocab_size_of
from lit_fused.errors import UserError

SMALL = 2**26  # bytes; starting processes for less takes longer than it saves
_SAMPLE, _SAMPLE_OF_MORE = 2**25, 2**23  # characters on which a tokenizer is trained, of small data and of others
_BATCH = 2**22  # bytes that are encoded at once


def trained_tokenizer(
    parts: Sequence[tuple[Dataset, Split]], encoding: Encoding, vocab_size: int
) -> PreTrainedTokenizerBase:
    """Train a tokenizer on the documents to train on, or of many data on a sample: some of them, or some of each.

    It is saved beside the first records, and loaded from there the next time.
    """
    total = sum(records.data.nbytes for records, _ in parts)
    most, number = _SAMPLE if total <= SMALL else _SAMPLE_OF_MORE, sum(len(records) for records, _ in parts)
    step = min(-(-total // most), max(1, number // 64))
    longest = None if total <= most else most * step // number
    sample = []
    for records, split in parts:
        for content in contents_of(records.select(range(0, len(records), step)), encoding.text_column):
            sample += [c[:longest] if isinstance(c, str) else c for is_out, c in split.sides(content) if not is_out]
    files = parts[0][0].cache_files
    if not files:
        return encoding.train(sample, vocab_size)
    key = _digest(sample, vocab_size, type(encoding).__name__, asdict(cast(Any, encoding)))
    folder = Path(files[0]["filename"]).parent / f"tokenizer-{key}"
    if not folder.exists():
        with written_whole(folder) as partial:
            encoding.train(sample, vocab_size).save_pretrained(partial)
    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def tokenized(
    records: Dataset, encoder: Encoding, split: Split, workers: int | None = None, weight: str | None = None
) -> Dataset:
    """Return the documents as a table of "input_ids", "held_out", "note" for a person, and "loss_mask", 1 where loss is
    wanted, unless it is everywhere. A document that is left out has no tokens.

    Args:
        weight: The column of numbers by which a document's "loss_mask", then float32, is multiplied, or the name of
            such numbers in its messages; without one 1. A document of weight 0 is left out.
        workers: Processes. None: one for each core, for more than 64 MiB.
    """
    if workers is None:
        workers = len(os.sched_getaffinity(0)) if records.data.nbytes > SMALL else 1
    if workers > 1:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # The processes are the parallelism.
    column, encoder.columns = encoder.text_column, records.column_names
    if weight is not None and weight not in records.column_names and (column or not _in_messages(weight, records)):
        there = ", ".join(records.column_names)
        raise UserError(f"data.loss_weight={weight} is no column of the data, which have {there}")
    dtype = "uint16" if vocab_size_of(encoder.tokenizer) <= 2**16 else "uint32"
    encode = _Encode(encoder, split, column, weight, dtype)
    files = [file["filename"] for file in records.cache_files]
    options = type(encoder).__name__, asdict(cast(Any, encoder)), encoder.block_size
    key = files, len(records), options, tokenizer_digest(encoder.tokenizer), asdict(split), weight
    return records.map(
        encode,
        with_indices=True,
        batched=True,
        batch_size=_batch_size(records),
        input_columns=column if column is None or weight is None else [column, weight],
        remove_columns=records.column_names,
        features=encode.features,
        num_proc=min(workers, len(records)) if workers > 1 else None,
        # The library would hash the tokenizer with what its last call left in it.
        new_fingerprint=_digest(*key) if files else None,
        desc="encoding",
    )


def _in_messages(weight: str, records: Dataset) -> bool:
    """Return whether something in the first records has an entry of this name."""
    return f"{weight!r}:" in repr(records[:1000])


def notes_of(table: Dataset) -> Counter[str]:
    """Return how often the encoding gave each note."""
    return Counter(note for note in table["note"] if note)


@dataclass(frozen=True)
class _Encode:
    """A function of a batch of records, which ``map`` calls."""

    encoder: Encoding
    split: Split
    column: str | None
    weight: str | None
    dtype: str

    @property
    def features(self) -> Features:
        kinds = {"input_ids": List(Value(self.dtype)), "held_out": Value("bool"), "note": Value("string")}
        return Features(kinds | ({"loss_mask": List(Value(self._of_mask))} if self._of_mask else {}))

    @property
    def _of_mask(self) -> str | None:
        return "float32" if self.weight else None if self.column else "uint8"

    def __call__(self, batch: Any, *others: list[Any]) -> pa.Table:
        """Return the documents of texts, with their weights if there are any, or of records; the last are indices."""
        indices = others[-1]
        weights = others[0] if len(others) > 1 else [] if self.column else batch.get(self.weight, [])
        documents = zip(indices, _contents(batch, self.column), strict=True)
        parts = [(index, *part) for index, content in documents if content for part in self.split.sides(content)]
        tokens, lengths, loss_mask, held_out, notes = [], [], [], [], []
        for (index, is_out, _), one in zip(parts, self._encoded(parts), strict=True):
            if self._of_mask is not None:
                one = self._weighed(one, index, weights[index - indices[0]] if weights else None)
            ends = one.ends or (len(one.tokens),)
            lengths += np.diff([0, *ends]).tolist()
            held_out += [is_out] * len(ends)
            notes += ["; ".join(one.notes) or None, *[None] * (len(ends) - 1)]
            tokens.append(one.tokens)
            loss_mask.append(one.loss_mask)
        columns = {"input_ids": _lists(tokens, lengths, self.dtype), "held_out": pa.array(held_out, pa.bool_())}
        columns["note"] = pa.array(notes, pa.string())
        if self._of_mask is not None:
            columns["loss_mask"] = _lists(loss_mask, lengths, self._of_mask)
        return pa.table(columns)

    def _weighed(self, one: Encoded, index: int, weight: Any) -> Encoded:
        """Return a document with the weights of its loss."""
        mask = np.ones(len(one.tokens), np.bool_) if one.loss_mask is None else one.loss_mask
        if self.weight is None:
            if ((mask != 0) & (mask != 1)).any():
                raise UserError(
                    f"record {index + 1}: a message has a weight that is neither 0 nor 1; data.loss_weight=weight "
                    "takes such weights"
                )
            return replace(one, loss_mask=mask)
        try:
            factor = loss_weight(f"column {self.weight!r}", weight)
        except UserError as error:
            raise UserError(f"record {index + 1}: {error}") from error
        weighed = replace(one, loss_mask=mask * np.float32(factor))
        return weighed if factor else leave_out(f"its {self.weight} is 0")

    def _encoded(self, parts: list[tuple[int, bool, Any]]) -> list[Encoded]:
        try:
            return self.encoder([content for _, _, content in parts])
        except UserError as error:
            if len(parts) == 1:
                raise UserError(f"record {parts[0][0] + 1}: {error}") from error
            return [self._encoded([part])[0] for part in parts]


def _lists(arrays: list[Any], lengths: list[int], dtype: str) -> pa.ListArray:
    values = np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)
    return pa.ListArray.from_arrays(pa.array(np.cumsum([0, *lengths]), pa.int32()), pa.array(values))


def _batch_size(records: Dataset) -> int:
    return max(1, min(1000, _BATCH * len(records) // (records.data.nbytes + 1)))


def contents_of(records: Dataset, column: str | None) -> Iterator[Any]:
    """Yield the texts of a column, or the records, that are not empty."""
    chosen: Any = records if column is None else records.select_columns([column])
    for batch in chosen.iter(batch_size=_batch_size(records)):
        yield from filter(None, _contents(batch[column] if column else batch, column))


def _contents(batch: Any, column: str | None) -> list[Any]:
    """Return the texts of a batch, or its records, without the keys that Arrow has filled with None."""
    if column is None:
        return [_without_none(dict(zip(batch, values, strict=True))) for values in zip(*batch.values(), strict=True)]
    if wrong := next((text for text in batch if text is not None and not isinstance(text, str)), None):
        raise UserError(f"the column {column!r} should hold texts, and has {wrong!r}; set data.text_column to another")
    return list(batch)


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [*map(_without_none, value)] if isinstance(value, list) else value


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]
