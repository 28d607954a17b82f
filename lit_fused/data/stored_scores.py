"""A file of a model's scores for the rows of prepared data: what ``mode=score`` writes and ``data.scores`` reads.

It is a Parquet file with one row group for each row of the data, so that any row is read alone. Only positions with a
target have numbers:

    fingerprint      uint32, of the row's token ids and labels
    entries          list of int32, the k most probable entries of each position, one after the other
    log_probs        list of float32, theirs, in nats, over the header's temperature
    target_log_prob  list of float32, of the target of each position, over the same temperature

The file's metadata has the :class:`ScoreHeader`. Scores of other data, of another tokenizer or in another order of rows
are refused.

T positions, k stored entries of each.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from pyarrow import ArrowException
from torch import Tensor

from lit_fused.data.packing import SCORES, Rows
from lit_fused.errors import UserError
from lit_fused.ops.label_checks import IGNORE_INDEX

_KEY, _CHECKED = b"lit_fused.scores", 16  # rows that are compared when a file is opened
_SCHEMA = {
    "fingerprint": pa.uint32(),
    "entries": pa.list_(pa.int32()),
    "log_probs": pa.list_(pa.float32()),
    "target_log_prob": pa.list_(pa.float32()),
}


@dataclass(frozen=True)
class ScoreHeader:
    """Describe what the numbers of a file are of."""

    k: int
    temperature: float
    vocabulary: int  # of the model that was asked
    model: str
    tokenizer: str | None  # its digest; None for data that came as tokens
    shifted: bool  # position t has the scores of label t + 1, as for causal models; else of label t
    rows: dict[str, int]  # by set, in the order in which they follow each other: "train", "val", or "train/web" ...


class ScoreWriter:
    """Write a file of scores row by row. It appears whole or not at all, when the ``with`` block has ended."""

    def __init__(self, path: str | Path, header: ScoreHeader) -> None:
        self.path, self._partial = Path(path), Path(f"{path}.part")
        fields = [pa.field(name, kind) for name, kind in _SCHEMA.items()]
        self._schema = pa.schema(fields, metadata={_KEY: json.dumps(asdict(header)).encode()})
        self._header = header

    def __enter__(self) -> "ScoreWriter":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = pq.ParquetWriter(self._partial, self._schema)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._file.close()
        if kind is None:
            self._partial.replace(self.path)
        else:
            self._partial.unlink(missing_ok=True)

    def add(self, row: Mapping[str, Tensor], scores: tuple[Tensor, Tensor, Tensor]) -> None:
        """Append a row of the data, given entries (T, k), log-probabilities (T, k) and the target's (T,)."""
        valid = _targets(row["labels"], self._header.shifted) != IGNORE_INDEX
        numbers = [score[: len(valid)][valid].flatten().cpu().numpy() for score in scores]
        values = dict(zip(_SCHEMA, [fingerprint(row), *numbers], strict=True))
        columns = [pa.array([values[name]], kind) for name, kind in _SCHEMA.items()]
        self._file.write_table(pa.Table.from_arrays(columns, schema=self._schema), row_group_size=1)


class StoredScores:
    """Read a file of scores, row by row. It pickles as its path, so that loader workers open it anew.

    Raises UserError if there is no such file, or it has no scores.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        try:
            self._file = pq.ParquetFile(self.path, memory_map=True)
            metadata = self._file.schema_arrow.metadata or {}
            self.header = ScoreHeader(**json.loads(metadata[_KEY]))
        except (OSError, ArrowException, KeyError, TypeError, ValueError) as error:
            reason = "it is no file of scores" if isinstance(error, KeyError) else str(error).splitlines()[0]
            raise UserError(f"data.scores={path} cannot be read ({reason}); write one with mode=score") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredScores, (self.path,)

    def check_tokenizer(self, digest: str | None) -> None:
        if digest != self.header.tokenizer:
            raise UserError(
                f"the scores in {self.path} are of texts in another tokenizer, so their entries are other tokens; "
                "score these data with mode=score, or give data.tokenizer as it was then"
            )

    def of(self, name: str, rows: Rows) -> "ScoredRows":
        """Return a set's rows with their scores; UserError unless they are the rows that were scored."""
        counts = self.header.rows
        if counts.get(name) != len(rows):
            there = f"{counts[name]:,} rows" if name in counts else f"no set {name}, but {', '.join(counts)}"
            raise UserError(
                f"the scores in {self.path} are of other data: these have {len(rows):,} rows in {name}, and the file "
                f"has {there}; score these data with mode=score, with the same data.path, packing and block_size"
            )
        names = [*counts]
        found = ScoredRows(rows, self, sum(counts[other] for other in names[: names.index(name)]))
        for index in np.unique(np.linspace(0, len(rows) - 1, min(_CHECKED, len(rows))).astype(int)):
            found[int(index)]
        return found

    def read(self, place: int, row: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the batch of a row has besides: "teacher_entries" int64 and "teacher_log_probs" (T, k), -1 and 0
        where there is no target, and "teacher_target_log_prob" (T,)."""
        values = self._file.read_row_group(place).to_pydict()
        if values["fingerprint"][0] != fingerprint(row):
            raise UserError(self._mismatch(place, fingerprint(row)))
        valid = _targets(row["labels"], self.header.shifted) != IGNORE_INDEX
        found = {}
        for column, (name, fill) in zip([*_SCHEMA][1:], SCORES.items(), strict=True):
            stored = torch.tensor(values[column][0], dtype=torch.int64 if fill == -1 else torch.float32)
            shape = (len(valid), self.header.k) if column != "target_log_prob" else (len(valid),)
            numbers = torch.full(shape, fill, dtype=stored.dtype)
            numbers[valid] = stored.view(-1, *shape[1:])
            found[name] = numbers
        return found

    def _mismatch(self, place: int, wanted: int) -> str:
        everywhere = self._file.read(["fingerprint"])["fingerprint"].to_pylist()
        what = "other data"
        if wanted in everywhere:
            what = f"these rows in another order (row {place} of the file is now at {everywhere.index(wanted)})"
        return (
            f"the scores in {self.path} are of {what}; score these data with mode=score, with the same data.path, "
            "packing and block_size"
        )


class ScoredRows(Rows):
    """Rows of a data set, each with its stored scores."""

    def __init__(self, rows: Rows, scores: StoredScores, start: int) -> None:
        self.rows, self.scores, self.start = rows, scores, start
        self.num_rows, self.share_of_tokens = len(rows), rows.share_of_tokens

    def _row(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        return row | self.scores.read(self.start + index, row)

    def _lengths(self) -> Any:
        return self.rows._lengths()

    def summary(self) -> str:
        return f"{self.rows.summary()}, with the {self.scores.header.k} likeliest entries of {self.scores.header.model}"


def fingerprint(row: Mapping[str, Tensor]) -> int:
    """Return the CRC32 of a row's token ids and labels."""
    first = zlib.crc32(row["input_ids"].numpy().tobytes())
    return zlib.crc32(row["labels"].numpy().tobytes(), first)


def _targets(labels: Tensor, shifted: bool) -> Tensor:
    return F.pad(labels[1:], (0, 1), value=IGNORE_INDEX) if shifted else labels
