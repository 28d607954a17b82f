"""A file of a model's scores for the rows of prepared data: what ``mode=score`` writes and ``data.scores`` reads.

It is a Parquet file with one row group for each row of the data, so that any row is read alone:

    fingerprint      uint32, of the row's token ids and labels

and then, of a teacher, numbers of the positions with a target:

    entries          list of int32, the k most probable entries of each position, one after the other
    log_probs        list of float32, theirs, in nats, over the header's temperature
    target_log_prob  list of float32, of the target of each position, over the same temperature

or, of a teacher in place of these,

    hidden_states    the bytes of (positions, D) numbers of the header's dtype: the input of its output layer, which is
                     in a file beside it, NAME.head.pt

or, of the reference of preferences:

    log_prob         list of float64, of each answer, the sum over its tokens in nats; behind that of a single answer
                     also that of the answer to another prompt

The file's metadata has the :class:`ScoreHeader`. T positions, k stored entries of each.
"""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_fused.atomic import written_whole
from lit_fused.data.loader import SCORES
from lit_fused.data.packing import Rows
from lit_fused.errors import UserError
from lit_fused.ops.label_checks import IGNORE_INDEX

_KEY = b"lit_fused.scores"
# The columns of a file, with their names and dtypes in batches.
_OF_TOKENS = {
    "entries": (pa.int32(), "teacher_entries", torch.int64),
    "log_probs": (pa.float32(), "teacher_log_probs", torch.float32),
    "target_log_prob": (pa.float32(), "teacher_target_log_prob", torch.float32),
}
_OF_HIDDEN_STATES = {"hidden_states": (pa.binary(), "teacher_hidden_states", torch.float32)}
_OF_ANSWERS = {"log_prob": (pa.float64(), "reference_log_prob", torch.float64)}


@dataclass(frozen=True)
class ScoreHeader:
    """Describe what the numbers of a file are of."""

    k: int | None  # entries of each position, 0 with hidden states; None: the numbers are those of answers
    temperature: float
    vocabulary: int  # entries of the teacher that was scored
    model: str
    shifted: bool  # position t has the scores of label t + 1, as for causal models; else of label t
    rows: dict[str, int]  # by set, in the order in which they follow each other: "train", "val", or "train/web" ...
    width: int | None = None  # D of hidden states, which are stored in place of entries; None: they are not
    dtype: str = "float32"  # theirs

    @property
    def columns(self) -> dict[str, tuple[pa.DataType, str, torch.dtype]]:
        if self.width is not None:
            return _OF_HIDDEN_STATES
        return _OF_ANSWERS if self.k is None else _OF_TOKENS

    def places(self, row: Mapping[str, Tensor]) -> Tensor:
        """Return which positions, or answers, of a row have numbers, (T,) or (answers,)."""
        if self.k is None:
            return torch.ones(len(row["desirable"]) + ("other_input_ids" in row), dtype=torch.bool)
        labels = row["labels"]
        return (F.pad(labels[1:], (0, 1), value=IGNORE_INDEX) if self.shifted else labels) != IGNORE_INDEX


@dataclass(frozen=True)
class ScoreWriter:
    """Write a file of scores row by row."""

    header: ScoreHeader
    file: pq.ParquetWriter

    @classmethod
    @contextmanager
    def open(cls, path: str | Path, header: ScoreHeader) -> Iterator["ScoreWriter"]:
        """Yield a writer of a file that appears whole or not at all, when the ``with`` block has ended."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        kinds = {name: kind for name, (kind, *_) in header.columns.items()}
        lists = [pa.field(name, kind if pa.types.is_binary(kind) else pa.list_(kind)) for name, kind in kinds.items()]
        schema = pa.schema([pa.field("fingerprint", pa.uint32()), *lists], {_KEY: json.dumps(asdict(header))})
        # Hidden states are as long once compressed, and no two rows have the same.
        plain = {} if header.width is None else {"compression": "none", "use_dictionary": False}
        options: Any = {"write_page_checksum": True, **plain}
        with written_whole(Path(path)) as partial, pq.ParquetWriter(partial, schema, **options) as file:
            yield cls(header, file)

    def add(self, row: Mapping[str, Tensor], scores: Sequence[Tensor]) -> None:
        """Append a row of the data, given entries (T, k), log-probabilities (T, k) and the target's (T,), or hidden
        states (T, D), or the sums of its answers. UserError if they are not finite."""
        places = self.header.places(row)
        numbers = [score[: len(places)][places.to(score.device)].flatten().cpu() for score in scores]
        if not all(values.isfinite().all() for values in numbers):
            raise UserError(
                "the model's log-probabilities are not finite, so no scores are written; its weights may not be "
                "finite, or float16 too narrow for it: try precision=bf16-mixed or 32-true"
            )
        if self.header.width is not None:
            values: list[Any] = [each.contiguous().view(torch.uint8).numpy().tobytes() for each in numbers]
        else:
            values = [each.numpy() for each in numbers]
        columns = zip([fingerprint(row), *values], self.file.schema.types, strict=True)
        table = pa.Table.from_arrays([pa.array([each], kind) for each, kind in columns], schema=self.file.schema)
        self.file.write_table(table, row_group_size=1)


def head_path(path: Path) -> Path:
    """Return the path of the output layer beside a file of hidden states."""
    return path.with_suffix(".head.pt")


def write_output_layer(path: Path, layer: Mapping[str, Any]) -> None:
    """Write the output layer of the hidden states of a file, whole or not at all."""
    tensors = {name: value.cpu().clone() if isinstance(value, Tensor) else value for name, value in layer.items()}
    with written_whole(head_path(path)) as partial:
        torch.save(tensors, partial)


class StoredScores:
    """Read a file of scores, row by row. It pickles as its path, which workers open anew."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self._file = pq.ParquetFile(self.path, memory_map=True, page_checksum_verification=True)
        header = (self._file.schema_arrow.metadata or {}).get(_KEY)
        if header is None:
            raise UserError(f"data.scores={path} is no file of scores; write one with mode=score")
        self.header = ScoreHeader(**json.loads(header))

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredScores, (self.path,)

    def output_layer(self) -> dict[str, Any]:
        """Return the output layer of stored hidden states: "weight" (V, D), "bias" (V,) or None, "scale" and
        "softcap"."""
        return torch.load(head_path(self.path), map_location="cpu", weights_only=True, mmap=True)

    def of(self, name: str, rows: Rows) -> "ScoredRows":
        """Return a set's rows with their scores; UserError unless they are the rows that were scored."""
        if self.header.rows.get(name) != len(rows):
            raise self._of_others(f"of other data: these have {len(rows):,} rows in {name}, and it {self.header.rows}")
        names = [*self.header.rows]
        found = ScoredRows(rows, self, sum(self.header.rows[other] for other in names[: names.index(name)]))
        for index in range(0, len(rows), 1 + len(rows) // 16):  # Each row is checked when it is read, some of them now.
            found[index]
        return found

    def read(self, place: int, row: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the batch of a row has besides: "teacher_entries" int64 and "teacher_log_probs" (T, k), -1 and 0
        where there is no target, and "teacher_target_log_prob" (T,); or "reference_log_prob" (answers,) float64, and of
        a single answer "other_reference_log_prob" (1,)."""
        values = self._file.read_row_group(place)
        if values["fingerprint"][0].as_py() != fingerprint(row):
            raise self._of_others(f"of other data, or of these in another order (row {place})")
        places, found = self.header.places(row), {}
        for column, (_, name, dtype) in self.header.columns.items():
            width = (self.header.k or 0,) if column in ("entries", "log_probs") else ()
            if self.header.width is not None:
                width, dtype = (self.header.width,), getattr(torch, self.header.dtype)
            numbers = torch.full((len(places), *width), SCORES.get(name, 0.0), dtype=dtype)
            if self.header.width is None:
                stored = torch.tensor(values[column][0].values.to_numpy(), dtype=dtype)
            else:
                memory = values[column][0].as_buffer()
                stored = torch.from_dlpack(pa.Array.from_buffers(pa.uint8(), memory.size, [None, memory])).view(dtype)
            numbers.index_copy_(0, places.nonzero().squeeze(1), stored.view(-1, *width))
            found[name] = numbers
        if "other_input_ids" in row and self.header.k is None:
            own = found["reference_log_prob"]
            found |= {"reference_log_prob": own[:1], "other_reference_log_prob": own[1:]}
        return found

    def _of_others(self, what: str) -> UserError:
        return UserError(
            f"the scores in {self.path} are {what}; score these data with mode=score, with the same data.path, "
            "data.tokenizer, packing and block_size"
        )


class ScoredRows(Rows):
    """Rows of a data set, each with its stored scores."""

    def __init__(self, rows: Rows, scores: StoredScores, start: int) -> None:
        self.rows, self.scores, self.start = rows, scores, start
        self.num_rows, self.share_of_tokens = len(rows), rows.share_of_tokens

    def _row(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        return row | self.scores.read(self.start + index, row)


def fingerprint(row: Mapping[str, Tensor]) -> int:
    """Return the CRC32 of a row's token ids and labels, and of the lengths of the answers in it."""
    names = [of + name for of in ("", "other_") for name in ("input_ids", "labels", "lengths") if of + name in row]
    return reduce(lambda found, name: zlib.crc32(row[name].numpy().tobytes(), found), names, 0)
