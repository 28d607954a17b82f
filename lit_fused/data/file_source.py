"""Read documents from files and folders, piece by piece.

One text file is one document; so is one line of JSON, and one row of Parquet, CSV or TSV. A large file is several
pieces, whose exact borders (the next end of a line) are found when they are read. A text file of more than 4 MiB is cut
at the ends of lines into documents of about that size, so that none has to fit into memory.

The datasets library (5.2) cannot replace this reader: it holds a text file of any size in memory and changes its line
ends, fills in fields that a line of JSON lacks, does not say which line is broken, and copies all into its own cache.
"""

import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import shutil
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

import pyarrow as pa
import pyarrow.parquet as pq

from lit_fused.data.long_json import LONG_LINE, Outline, as_line, mapped, outline, text_border
from lit_fused.data.option_checks import stat_of_file
from lit_fused.data.separated_values import SEPARATORS, read_table
from lit_fused.data.source import Document, DocumentError, Piece, Record, Source, no_column, select_content
from lit_fused.data.text_encodings import marked_encoding, suggestion
from lit_fused.errors import UserError, checked_options

TEXT_SUFFIXES = (".txt", ".md", ".py")
RECORD_SUFFIXES = (".jsonl", ".parquet", *SEPARATORS)
TABLE_SUFFIXES = (".json",)  # refused: nobody means to read such a table as one text
DOCUMENT_BYTES = 2**22  # a larger text file is several documents
_MIN_PIECE, _MAX_PIECE, _PIECES = 2**23, 2**28, 1024  # bytes, bytes, and the number of pieces between these sizes
COMPRESSED: dict[str, Callable[[str], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda file: io.BufferedReader(cast(Any, pa.CompressedInputStream(pa.OSFile(file), "zstd"))),
}

_STDLIB = Path(sysconfig.get_paths()["stdlib"])
# Its folders of installed packages, tests, generated tables and applications.
_STDLIB_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "ensurepip", "__pycache__", "test", "tests"}
    | {"encodings", "pydoc_data", "lib2to3", "idlelib", "turtledemo"}
)
_READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, UnicodeError, pa.ArrowException)


@dataclass(frozen=True)
class _Part:
    """Bytes ``[start, stop)`` of a file, or the row groups of a Parquet file; ``stop=None`` is all of it at once."""

    file: str
    kind: str  # "text", "jsonl", "parquet", "table"
    start: int = 0
    stop: int | None = None
    cut: bool = False  # data.max_bytes ends it exactly at ``stop``, not at the next end of a line


class FileSource(Source):
    """A file; or a folder, of which every file with a known suffix is read, recursively, hidden ones excepted.

    ``.txt``, ``.md``, ``.py``; ``.jsonl``, ``.parquet``, ``.csv``, ``.tsv``; each also ``.gz``, ``.bz2``, ``.xz`` or
    ``.zst``. A single file with another suffix is text. A compressed file, a table of separated values, and a file in
    UTF-16 or UTF-32 are one piece. Where documents are whole records, text files are left out.

    Args:
        path: The file or folder. None: the sources of Python's standard library that are UTF-8.
        encoding: The character encoding of text, JSON and CSV, as Python names it.
        max_bytes: Read at most so many bytes of text and JSON files; the file that crosses the limit is cut there.

    UserError if the encoding is unknown or a value out of range, and of ``pieces`` if there is nothing to read.
    """

    @checked_options("data.", max_bytes=1)
    def __init__(self, path: str | Path | None, encoding: str = "utf-8", max_bytes: int | None = None) -> None:
        try:
            self.newline_is_a_byte = "\n".encode(encoding) == b"\n"  # false for UTF-16, whose lines cannot be found
        except LookupError:
            raise UserError(
                f"data.encoding must be an encoding that Python knows, such as utf-8 or latin-1; got {encoding!r}"
            ) from None
        self.path = None if path is None else Path(path).expanduser().absolute()
        self.name = "the standard library" if self.path is None else str(self.path)
        self.encoding, self.max_bytes = encoding, max_bytes

    def identity(self) -> Any:
        root = _STDLIB if self.path is None else self.path
        return ["files", str(root), self.path is None, self.column, self.encoding, self.max_bytes]

    def pieces(self) -> list[Piece]:
        files = [(file, stat_of_file(file)) for file in self._files()]
        target = min(max(sum(stat.st_size for _, stat in files) // _PIECES, _MIN_PIECE), _MAX_PIECE)
        pieces: list[Piece] = []
        remaining = sys.maxsize if self.max_bytes is None else self.max_bytes
        for file, stat in files:
            if remaining <= 0:
                break
            for part, size in self._parts(file, stat.st_size, target, remaining):
                if not pieces or pieces[-1].size + size > target:
                    pieces.append(Piece(0, [], []))
                pieces[-1] = replace(pieces[-1], size=pieces[-1].size + size)
                pieces[-1].fingerprint.append([part.file, stat.st_size, stat.st_mtime_ns, part.start, part.stop])
                pieces[-1].payload.append(part)
            remaining -= stat.st_size
        return pieces

    def _files(self) -> list[Path]:
        suffixes = RECORD_SUFFIXES if self.column is None else (*TEXT_SUFFIXES, *RECORD_SUFFIXES)
        path = self.path
        if path is None and self.column is not None:
            return stdlib_files()
        if path is not None and os.path.isdir(path):
            files = find_files(path, tuple(suffix + packed for suffix in suffixes for packed in ("", *COMPRESSED)))
            if not files:
                raise UserError(
                    f"the folder {path} holds no {', '.join(suffixes)} file (nor one with {', '.join(COMPRESSED)} "
                    "behind); set data.path to one that does"
                )
            return files
        if path is not None and not os.path.lexists(path):
            raise UserError(f"data.path must be a file or a folder, but {path} does not exist; give the path of one")
        if path is not None and _suffix(path) in TABLE_SUFFIXES:
            raise UserError(
                f"data.path must be text, {' or '.join(RECORD_SUFFIXES)}; {path} is a table of another kind: "
                "read it with data=hf, or convert it to .jsonl, one object a line"
            )
        if path is None or (_kind(path) == "text" and self.column is None):
            raise UserError(f"data.path must be {' or '.join(suffixes)}, or a folder of them; got {path}")
        return [path]

    def _parts(self, file: Path, size: int, target: int, limit: int) -> Iterator[tuple[_Part, int]]:
        kind, packed = _kind(file), file.suffix in COMPRESSED
        if kind == "parquet" and not packed and size > target and self.max_bytes is None:
            yield from _row_groups(file, size, target)
        elif packed or kind in ("parquet", "table") or not self.newline_is_a_byte:
            if self.max_bytes is not None:
                raise UserError(f"data.max_bytes counts plain text and JSON files only; set it to null to read {file}")
            yield _Part(str(file), kind), size
        else:
            full, size = size, min(size, limit)
            if not size:  # it is read as an empty document, so that it is counted
                kind = "text"
            step = max(target // DOCUMENT_BYTES, 1) * DOCUMENT_BYTES
            for start in range(0, max(size, 1), step):
                stop = min(start + step, size)
                yield _Part(str(file), kind, start, stop, cut=stop == limit != full), stop - start

    def read(self, piece: Piece) -> Iterator[Document]:
        for part in piece.payload:
            try:
                source = self._of_marked(part)
                if source is self:
                    yield from self._read_part(part)
                elif not part.start:  # its lines cannot be found in the middle, so the first part is all of it
                    yield from source._read_part(replace(part, stop=None))
            except _READ_ERRORS as error:
                if self.path is not None:
                    yield Document(self._unreadable(part.kind, error), lambda file=part.file: file)

    def _read_part(self, part: _Part) -> Iterator[Document]:
        text = self._whole_text if part.stop is None else self._text
        return {"parquet": self._rows, "jsonl": self._lines, "table": self._table, "text": text}[part.kind](part)

    def _of_marked(self, part: _Part) -> "FileSource":
        """Return the source with the encoding that the file's byte order mark tells, or itself."""
        if part.kind == "parquet" or codecs.lookup(self.encoding).name != "utf-8":
            return self
        with _open(part.file) as stream:
            encoding = marked_encoding(stream)
        if encoding is None:
            return self
        if self.max_bytes is not None:
            raise UserError(f"data.max_bytes counts no {encoding} files; set it to null to read {part.file}")
        marked = copy(self)
        marked.encoding, marked.newline_is_a_byte = encoding, False
        return marked

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
                # A character that max_bytes cuts in two is dropped.
                is_whole = not (part.cut and stop == part.stop)
                try:
                    text = codecs.getincrementaldecoder(self.encoding)().decode(content, final=is_whole)
                except UnicodeDecodeError as error:
                    if self.path is None:
                        continue
                    text = self._unreadable("text", error)
                yield Document(text, lambda: part.file)

    def _whole_text(self, part: _Part) -> Iterator[Document]:
        with _open(part.file) as binary, io.TextIOWrapper(binary, self.encoding, newline="") as stream:
            documents = iter(lambda: stream.read(DOCUMENT_BYTES) + stream.readline(DOCUMENT_BYTES), "")
            for text in chain([next(documents, "")], documents):
                yield Document(text, lambda: part.file)

    def _lines(self, part: _Part) -> Iterator[Document]:
        with _open(part.file) as binary:
            # A file whose line ends are not bytes is one part.
            stream = binary if self.newline_is_a_byte else io.TextIOWrapper(binary, self.encoding, newline="\n")
            # The text of a very long line is cut, as that of a text file is, if its bytes lie in the file.
            is_utf8 = codecs.lookup(self.encoding).name == "utf-8"
            limit = LONG_LINE if part.stop is not None and self.column is not None and is_utf8 else -1
            position = number = 0
            if part.start:  # the line that begins before this part belongs to the part before, unless it is cut
                with mapped(binary) as view:
                    begins = view.rfind(b"\n", 0, part.start) + 1
                    position = begins if limit > 0 else view.find(b"\n", part.start - 1) + 1 or len(view)
                binary.seek(position)
            while (part.stop is None or position < part.stop) and (line := stream.readline(limit)):
                number += 1
                where = partial(_place, part.file, number if part.stop is None else None, position)
                if len(line) == limit and line[-1:] != b"\n":
                    status = os.fstat(binary.fileno())
                    found = outline(part.file, position, (status.st_size, status.st_mtime_ns))
                    yield from (Document(content, where) for content in self._long_line(binary, part, position, found))
                    position = binary.seek(found.end)
                    continue
                if position >= part.start and line.strip():
                    yield Document(self._parsed(line), where)
                position += len(line)

    def _long_line(
        self, stream: BinaryIO, part: _Part, start: int, found: Outline
    ) -> Iterator[str | Record | DocumentError]:
        content = self._parsed(found.line)
        if isinstance(content, str) and (string := found.strings.get(content)):
            assert self.column is not None
            assert part.stop is not None
            nominals = [*range(part.start, part.stop, DOCUMENT_BYTES), part.stop]
            with mapped(stream) as view:
                edges = [text_border(view, string, nominal, DOCUMENT_BYTES) for nominal in nominals]
                for begin, end in pairwise(edges):
                    if begin < end:
                        yield self._parsed(as_line(self.column, view[begin:end]))
        elif start >= part.start and found.line.strip():
            yield content

    def _parsed(self, line: bytes | str) -> str | Record | DocumentError:
        try:
            text = line if isinstance(line, str) else line.decode(self.encoding)
            record = json.loads(text.removeprefix("\ufeff").strip())
            if "\\ud" in text or "\\uD" in text:  # half of a surrogate pair is no character, and cannot be encoded
                json.dumps(record, ensure_ascii=False).encode()
        except UnicodeDecodeError as error:
            return self._unreadable("jsonl", error)
        except UnicodeEncodeError:
            return DocumentError("expected text, but it holds half of a surrogate pair, which is no character")
        except (ValueError, RecursionError) as error:  # Python reads no integer of more than 4,300 digits.
            reason = str(error).partition("; use sys.")[0]
            return DocumentError(f"expected one JSON object, but the line cannot be parsed: {reason}")
        if not isinstance(record, dict):
            return DocumentError(f"expected one JSON object, got {type(record).__name__}")
        return select_content(record, self.column)

    def _table(self, part: _Part) -> Iterator[Document]:
        encoding = "utf-8-sig" if codecs.lookup(self.encoding).name == "utf-8" else self.encoding  # Excel's mark
        wanted = [self.column] if self.column is not None else self.columns or []
        with _open(part.file) as binary, io.TextIOWrapper(binary, encoding, newline="") as stream:
            for number, row in read_table(stream, _suffix(Path(part.file)), wanted):
                content = row if isinstance(row, DocumentError) else select_content(row, self.column)
                yield Document(content, lambda number=number: f"{part.file}:{number}")

    def _rows(self, part: _Part) -> Iterator[Document]:
        with _seekable(part.file) as stream, pq.ParquetFile(stream) as parquet:
            names = parquet.schema_arrow.names
            if self.column is not None and self.column not in names:
                raise UserError(f"{part.file}: {no_column(self.column, names)}")
            groups = range(parquet.num_row_groups) if part.stop is None else range(part.start, part.stop)
            row = sum(parquet.metadata.row_group(group).num_rows for group in range(groups.start))
            columns = None if self.column is None else [self.column]
            for batch in parquet.iter_batches(64, row_groups=[*groups], columns=columns):
                for record in batch.to_pylist():
                    row += 1
                    content = select_content(record, self.column)
                    yield Document(content, lambda row=row: f"{part.file}, row {row}")

    def _unreadable(self, kind: str, error: Exception) -> DocumentError:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        expected = {"jsonl": "JSON", "table": "separated values", "parquet": "Parquet"}.get(kind, kind)
        encoding = "" if kind == "parquet" else f"{self.encoding} "
        hint = f"; set data.encoding to what it is in{suggestion(error)}" if isinstance(error, UnicodeError) else ""
        return DocumentError(f"expected {encoding}{expected}, but it cannot be read: {reason}{hint}")


def _border(stream: BinaryIO, nominal: int, size: int) -> int:
    """Return where the first line at or after byte ``nominal`` begins; in a line of many MiB, the first character."""
    if nominal <= 0 or nominal >= size:
        return max(0, min(nominal, size))
    stream.seek(nominal - 1)
    line = stream.readline(DOCUMENT_BYTES)
    if line.endswith(b"\n") or len(line) < DOCUMENT_BYTES:
        return nominal - 1 + len(line)
    continued = len(line[1:5]) - len(line[1:5].lstrip(bytes(range(0x80, 0xC0))))  # bytes that continue a character
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


def _place(file: str, number: int | None, position: int = 0) -> str:
    """Return ``file:line``. Without a number, the line is the one that begins at byte ``position``."""
    if number is None:
        with open(file, "rb") as stream:
            chunks = iter(lambda: stream.read(min(position - stream.tell(), 2**20)), b"")
            number = 1 + sum(chunk.count(b"\n") for chunk in chunks)
    return f"{file}:{number}"


def find_files(root: Path, suffixes: tuple[str, ...], skipped_folders: frozenset[str] = frozenset()) -> list[Path]:
    """Return the files below ``root`` that end in one of ``suffixes``, sorted, without hidden files and folders. Links
    are followed, and a folder to which several paths lead is read once."""

    def refuse(error: OSError) -> NoReturn:
        raise UserError(
            f"the folder {error.filename} cannot be read: {error.strerror}; permit it, or move it out of data.path"
        ) from error

    files: list[Path] = []
    seen = set[str]()
    for folder, subfolders, names in os.walk(root, onerror=refuse, followlinks=True):
        shown = [name for name in subfolders if name not in skipped_folders and not name.startswith(".")]
        subfolders[:] = sorted(shown, key=lambda name: (os.path.islink(os.path.join(folder, name)), name))
        if (real := os.path.realpath(folder)) in seen:
            subfolders.clear()
            continue
        seen.add(real)
        files += [Path(folder, name) for name in names if name.endswith(suffixes) and not name.startswith(".")]
    return sorted(files)


def stdlib_files() -> list[Path]:
    """Return the sources of the standard library that read like code people write, sorted."""
    return find_files(_STDLIB, (".py",), _STDLIB_SKIPPED)


def _kind(file: Path) -> str:
    suffix = _suffix(file)
    return "table" if suffix in SEPARATORS else suffix[1:] if suffix in RECORD_SUFFIXES else "text"


def _suffix(file: Path) -> str:
    """Return the suffix without that of the compression: ``.jsonl`` for ``a.jsonl.gz``."""
    return Path(file.stem).suffix if file.suffix in COMPRESSED else file.suffix


def _open(file: str) -> Any:
    return COMPRESSED[Path(file).suffix](file) if Path(file).suffix in COMPRESSED else open(file, "rb")


@contextmanager
def _seekable(file: str) -> Iterator[Any]:
    """Yield the file's name, or a temporary copy of the decompressed content."""
    if Path(file).suffix not in COMPRESSED:
        yield file
        return
    with _open(file) as packed, tempfile.TemporaryFile() as plain:
        shutil.copyfileobj(packed, plain)
        plain.seek(0)
        yield plain
