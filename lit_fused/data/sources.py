"""Where documents come from: files and folders, read piece by piece.

A source lists pieces that can each be read alone, in any order and process. The one trick: they are listed by names,
sizes and times of change, without opening a file, so that the next run knows in a moment that nothing has changed; and
a large file is several pieces, whose exact borders (the next end of a line) are found where they are read.

One text file is one document; so is one line of JSON, and one row of Parquet. A text file of more than 4 MiB is cut at
the ends of lines into documents of about that size: none has to fit into memory.
"""

import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import shutil
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeAlias, cast

import pyarrow as pa
import pyarrow.parquet as pq

from lit_fused.data.documents import stdlib_files, walk
from lit_fused.data.encoding import DocumentError
from lit_fused.errors import UserError

TEXT_SUFFIXES = (".txt", ".md", ".py")
RECORD_SUFFIXES = (".jsonl", ".parquet")
TABLE_SUFFIXES = (".json", ".csv", ".tsv")  # which nobody wants to be read as one text
DOCUMENT_BYTES = 2**22  # a larger text file is several documents
_MIN_PIECE, _MAX_PIECE, _PIECES = 2**23, 2**28, 1024  # bytes, bytes, and how many there are between these sizes

_OPENERS: dict[str, Callable[[str], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda file: io.BufferedReader(cast(Any, pa.CompressedInputStream(pa.OSFile(file), "zstd"))),
}
_READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, UnicodeDecodeError, pa.ArrowException)

Record: TypeAlias = dict[str, Any]


class Document(NamedTuple):
    """A document, or what is wrong with it; ``where()`` says for a person where it stands (``file:line``)."""

    content: str | Record | DocumentError
    where: Callable[[], str]


@dataclass(frozen=True)
class Piece:
    """A part of the inputs that is read alone.

    Attributes:
        size: In the source's units (bytes, documents), for progress; the first sample takes a share of each piece.
        fingerprint: JSON: what it is, and which version of its content.
        payload: What the source needs to read it: picklable.
    """

    size: int
    fingerprint: Any
    payload: Any


class Source(Protocol):
    """Documents, in pieces. Picklable."""

    @property
    def name(self) -> str:
        """For a person: the path, the data set."""
        ...

    def identity(self) -> Any:
        """JSON: what is read and how, whatever its content is now."""
        ...

    def pieces(self) -> list[Piece]:
        """Everything there is, in order. Cheap: it is called at every start."""
        ...

    def read(self, piece: Piece) -> Iterator[Document]: ...


@dataclass(frozen=True)
class _Part:
    """Bytes ``[start, stop)`` of a file, of a Parquet file row groups; ``stop=None``: all of it, in one go."""

    file: str
    kind: str  # "text", "jsonl", "parquet"
    start: int = 0
    stop: int | None = None
    cut: bool = False  # ends just there, and not at the next end of a line: data.max_bytes


class FileSource:
    """A file; or a folder, of which every file with a known suffix is read, recursively, hidden ones excepted.

    ``.txt``, ``.md``, ``.py``; ``.jsonl``, ``.parquet``; each also ``.gz``, ``.bz2``, ``.xz`` or ``.zst``. A file that
    is named itself and has another suffix is text. A plain text or JSON file is read in pieces, by several processes; a
    compressed one is read in one piece.

    Args:
        path: The file or folder. None: the sources of Python's standard library, of which those that are not UTF-8
            are left out.
        column: The field of a JSON line, or the column of a Parquet file, that is the text. None: documents are whole
            records (dict), and there are no text files among them.
        encoding: Of text and JSON, as Python names it.
        max_bytes: Read no more than this of text files; the one that crosses the limit is cut there.

    Raises:
        UserError: The encoding is unknown; ``pieces`` raises it where there is nothing to read.
    """

    def __init__(
        self,
        path: str | Path | None,
        column: str | None = "text",
        encoding: str = "utf-8",
        max_bytes: int | None = None,
    ) -> None:
        try:
            # so can a newline be searched for as a byte? not in UTF-16
            self.newline_is_a_byte = "\n".encode(encoding) == b"\n"
        except LookupError:
            raise UserError(
                f"data.encoding must be an encoding that Python knows, such as utf-8 or latin-1; got {encoding!r}"
            ) from None
        self.path = None if path is None else Path(path).expanduser().absolute()
        self.column = column
        self.encoding = encoding
        self.max_bytes = max_bytes

    @property
    def name(self) -> str:
        return "the standard library" if self.path is None else str(self.path)

    def identity(self) -> Any:
        root = _stdlib() if self.path is None else self.path
        return ["files", str(root), self.path is None, self.column, self.encoding, self.max_bytes]

    def pieces(self) -> list[Piece]:
        files = [(file, _stat(file)) for file in self._files()]
        target = min(max(sum(stat.st_size for _, stat in files) // _PIECES, _MIN_PIECE), _MAX_PIECE)
        pieces: list[Piece] = []
        parts: list[_Part] = []
        versions: list[Any] = []
        size, remaining = 0, self.max_bytes

        def finish() -> None:
            nonlocal size
            if parts:
                pieces.append(Piece(size, [*versions], (*parts,)))
            parts.clear()
            versions.clear()
            size = 0

        for file, stat in files:
            if remaining == 0:
                break
            for part, part_size in self._parts(file, stat.st_size, target, remaining):
                if parts and size + part_size > target:
                    finish()
                parts.append(part)
                versions.append([part.file, stat.st_size, stat.st_mtime_ns, part.start, part.stop])
                size += part_size
            if remaining is not None:
                remaining -= min(remaining, stat.st_size)
        finish()
        return pieces

    def _files(self) -> list[Path]:
        if self.path is None:
            return stdlib_files()
        suffixes = RECORD_SUFFIXES if self.column is None else (*TEXT_SUFFIXES, *RECORD_SUFFIXES)
        if not os.path.isdir(self.path):
            if not os.path.lexists(self.path):
                raise UserError(
                    f"data.path must be a file or a folder, but {self.path} does not exist; give the path of one"
                )
            if _suffix(self.path) in TABLE_SUFFIXES:
                raise UserError(
                    f"data.path must be text, {' or '.join(RECORD_SUFFIXES)}; {self.path} is a table of another kind: "
                    "read it with data=hf, or convert it to .jsonl, one object a line"
                )
            if _kind(self.path) == "text" and self.column is None:
                raise UserError(f"data.path must be {' or '.join(suffixes)}, or a folder of them; got {self.path}")
            return [self.path]
        files = walk(self.path, tuple(suffix + packed for suffix in suffixes for packed in ("", *_OPENERS)))
        if not files:
            raise UserError(
                f"the folder {self.path} holds no {', '.join(suffixes)} file (nor one with .gz, .bz2, .xz or .zst "
                "behind); set data.path to one that does"
            )
        return files

    def _parts(self, file: Path, size: int, target: int, limit: int | None) -> Iterator[tuple[_Part, int]]:
        kind, packed = _kind(file), file.suffix in _OPENERS
        if kind == "parquet" and not packed and size > target and limit is None:
            yield from _row_groups(file, size, target)
        elif packed or kind == "parquet" or not self.newline_is_a_byte:
            if limit is not None:
                raise UserError(f"data.max_bytes counts plain text and JSON files only; set it to null to read {file}")
            yield _Part(str(file), kind), size
        else:
            full, size = size, size if limit is None else min(size, limit)
            if not size:  # an empty document, so that it is counted
                kind = "text"
            step = max(target // DOCUMENT_BYTES, 1) * DOCUMENT_BYTES
            for start in range(0, max(size, 1), step):
                stop = min(start + step, size)
                yield _Part(str(file), kind, start, stop, cut=stop == limit != full), stop - start

    def read(self, piece: Piece) -> Iterator[Document]:
        for part in piece.payload:
            try:
                if part.kind == "parquet":
                    yield from self._rows(part)
                elif part.kind == "jsonl":
                    yield from self._lines(part)
                elif part.stop is None:
                    yield from self._whole_text(part)
                else:
                    yield from self._text(part)
            except _READ_ERRORS as error:
                if self.path is not None:
                    yield Document(self._unreadable(part.kind, error), lambda file=part.file: file)

    def _text(self, part: _Part) -> Iterator[Document]:
        with open(part.file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            assert part.stop is not None
            if part.start == part.stop:
                yield Document("", lambda: part.file)
            edges = [_border(stream, nominal, size) for nominal in range(part.start, part.stop, DOCUMENT_BYTES)]
            edges.append(part.stop if part.cut else _border(stream, part.stop, size))
            for start, stop in pairwise(edges):
                stream.seek(start)
                content = stream.read(stop - start)
                whole = not (part.cut and stop == part.stop)  # else the incomplete character at its end is dropped
                try:
                    text = codecs.getincrementaldecoder(self.encoding)().decode(content, final=whole)
                except UnicodeDecodeError as error:
                    if self.path is None:
                        continue
                    text = self._unreadable("text", error)
                yield Document(text, lambda: part.file)

    def _whole_text(self, part: _Part) -> Iterator[Document]:
        with _opened(part.file) as binary, io.TextIOWrapper(binary, self.encoding, newline="") as stream:
            text = stream.read(DOCUMENT_BYTES) + stream.readline(DOCUMENT_BYTES)
            yield Document(text, lambda: part.file)
            while text := stream.read(DOCUMENT_BYTES) + stream.readline(DOCUMENT_BYTES):
                yield Document(text, lambda: part.file)

    def _lines(self, part: _Part) -> Iterator[Document]:
        if self.newline_is_a_byte:
            with _opened(part.file) as stream:
                if part.start:
                    stream.seek(part.start - 1)
                    stream.readline()
                position = stream.tell() if part.stop is not None else 0
                number = 0
                while part.stop is None or position < part.stop:
                    line = stream.readline()
                    if not line:
                        break
                    number += 1
                    if line.strip():
                        where = partial(_line, part.file, number if part.stop is None else None, position)
                        yield Document(self._parsed(line), where)
                    position += len(line)
        else:
            with _opened(part.file) as binary, io.TextIOWrapper(binary, self.encoding, newline="\n") as stream:
                for number, line in enumerate(stream, start=1):
                    if line.strip():
                        yield Document(self._parsed(line), partial(_line, part.file, number))

    def _parsed(self, line: bytes | str) -> str | Record | DocumentError:
        try:
            text = line if isinstance(line, str) else line.decode(self.encoding)
            record = json.loads(text.removeprefix("\ufeff").strip())
            if "\\ud" in text.lower():  # half of a surrogate pair is no character
                json.dumps(record, ensure_ascii=False).encode()
        except UnicodeDecodeError as error:
            return self._unreadable("jsonl", error)
        except UnicodeEncodeError:
            return DocumentError("expected text, but it holds half of a surrogate pair, which is no character")
        except (json.JSONDecodeError, RecursionError) as error:
            return DocumentError(f"expected one JSON object, but the line cannot be parsed: {error}")
        if not isinstance(record, dict):
            return DocumentError(f"expected one JSON object, got {type(record).__name__}")
        return self._content(record)

    def _content(self, record: Record) -> str | Record | DocumentError:
        if self.column is None:
            return record
        if self.column not in record:
            return DocumentError(_no_column(self.column, record))
        text = record[self.column]
        if text is None:  # a missing value is an empty text
            return ""
        if not isinstance(text, str):
            return DocumentError(f"expected text in {self.column!r}, got {type(text).__name__}")
        return text

    def _rows(self, part: _Part) -> Iterator[Document]:
        with _seekable(part.file) as stream, pq.ParquetFile(stream) as parquet:
            names = parquet.schema_arrow.names
            if self.column is not None and self.column not in names:
                raise UserError(f"{part.file}: {_no_column(self.column, names)}")
            groups = range(parquet.num_row_groups) if part.stop is None else range(part.start, part.stop)
            row = sum(parquet.metadata.row_group(group).num_rows for group in range(groups.start))
            columns = None if self.column is None else [self.column]
            for batch in parquet.iter_batches(64, row_groups=[*groups], columns=columns):
                for record in batch.to_pylist():
                    row += 1
                    yield Document(self._content(record), lambda row=row: f"{part.file}, row {row}")

    def _unreadable(self, kind: str, error: Exception) -> DocumentError:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        expected = {"text": f"{self.encoding} text", "jsonl": f"{self.encoding} JSON", "parquet": "Parquet"}[kind]
        hint = "; set data.encoding to what it is in" if isinstance(error, UnicodeError) else ""
        return DocumentError(f"expected {expected}, but it cannot be read: {reason}{hint}")


def _suffix(file: Path) -> str:
    """Without the one that says how it is compressed."""
    return Path(file.stem).suffix if file.suffix in _OPENERS else file.suffix


def _kind(file: Path) -> str:
    return {".jsonl": "jsonl", ".parquet": "parquet"}.get(_suffix(file), "text")


def _opened(file: str) -> Any:
    """A binary, buffered stream of the decompressed content."""
    return _OPENERS.get(Path(file).suffix, partial(open, mode="rb"))(file)


@contextmanager
def _seekable(file: str) -> Iterator[Any]:
    """The file, or a temporary copy of its decompressed content."""
    if Path(file).suffix not in _OPENERS:
        yield file
        return
    with _opened(file) as packed, tempfile.TemporaryFile() as plain:
        shutil.copyfileobj(packed, plain)
        plain.seek(0)
        yield plain


def _border(stream: BinaryIO, nominal: int, size: int) -> int:
    """Where the first line at or behind byte ``nominal`` begins; within a line of many MiB, the first character."""
    if nominal <= 0 or nominal >= size:
        return max(0, min(nominal, size))
    stream.seek(nominal - 1)
    line = stream.readline(DOCUMENT_BYTES)
    if line.endswith(b"\n") or len(line) < DOCUMENT_BYTES:
        return nominal - 1 + len(line)
    continued = len(line[1:5]) - len(line[1:5].lstrip(bytes(range(0x80, 0xC0))))  # of a UTF-8 character
    return nominal + continued


def _row_groups(file: Path, size: int, target: int) -> Iterator[tuple[_Part, int]]:
    try:
        with pq.ParquetFile(file) as parquet:
            num_groups = parquet.num_row_groups
    except _READ_ERRORS:
        num_groups = 1  # reading it will say what is wrong
    step = max(1, num_groups * target // size)
    for start in range(0, num_groups, step):
        stop = min(start + step, num_groups)
        yield _Part(str(file), "parquet", start, stop), size * (stop - start) // num_groups


def _line(file: str, number: int | None, position: int = 0) -> str:
    """``file:line``, of the line that begins at byte ``position`` unless its number is known."""
    if number is None:
        number = 1
        with open(file, "rb") as stream:
            while position and (content := stream.read(min(position, 2**20))):
                number += content.count(b"\n")
                position -= len(content)
    return f"{file}:{number}"


def _no_column(column: str, names: Iterable[str]) -> str:
    there = ", ".join(map(repr, names)) or "none"
    return f"there is no column {column!r}; those that are there: {there}. Set data.text_column to one of them"


def _stat(file: Path) -> os.stat_result:
    try:
        return file.stat()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; mend it or leave it out of data.path") from error


def _stdlib() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])
