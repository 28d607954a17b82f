"""Store the tokens of many documents on the disk, and read them through the page cache.

A split is one flat array of tokens, which are read where they lie, and the index at which each document ends.

    store.json    describes the others: {"num_tokens", "vocab_size", "dtype", "path", "offset", "crc32"}
    tokens.bin    tokens, little-endian: uint16 for a vocabulary of at most 65,536 entries, else uint32
    ends.npy      int64 (D,): document d is the tokens [ends[d - 1], ends[d])
    wanted.bin    one byte per token: 1 where loss is wanted. Absent where it is wanted everywhere

``path`` is ``tokens.bin``, or another program's array, which is not copied; reading skips its first ``offset`` bytes.
``crc32`` has the checksum of each file's content. D documents.
"""

import json
import os
import sys
import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_fused.errors import UserError

Integers = npt.NDArray[np.int64]

_FILE = "store.json"


@dataclass(frozen=True)
class Encoded:
    """The tokens of one document, its end-of-text token among them if it has one."""

    tokens: npt.NDArray[np.integer[Any]]  # (n,); a document without any is left out, and counted
    wanted: npt.NDArray[np.bool_] | None = None  # (n,), True where loss is wanted; None: everywhere
    notes: tuple[str, ...] = ()  # for a person ("cut to 4096 tokens"); the report counts each
    ends: tuple[int, ...] | None = None  # the index after each, if it is stored as several documents; None: one


class TokenStore:
    """The documents of one split. It pickles as its folder's name, so that loader workers open the files anew.

    ``ends``, int64 ``(D,)``, is the index after each document's last token; every token is below ``vocab_size``.
    UserError if the folder is no store, or its files are not what ``store.json`` says.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            meta = json.loads((self.folder / _FILE).read_text())
            self.num_tokens: int = meta["num_tokens"]
            self.vocab_size: int = meta["vocab_size"]
            self.ends: Integers = np.load(self.folder / "ends.npy")
            if self.ends.dtype != np.int64 or self.ends.ndim != 1 or (np.diff(self.ends, prepend=0) <= 0).any():
                raise ValueError("ends.npy does not hold the growing ends of documents")
            if (self.ends[-1] if len(self.ends) else 0) != self.num_tokens:
                raise ValueError(f"ends.npy does not end at store.json's {self.num_tokens} tokens")
            self.num_documents = len(self.ends)
            tokens = _Numbers(self.folder / meta["path"], np.dtype(meta["dtype"]), meta["offset"], self.num_tokens)
            wanted = self.folder / "wanted.bin"
            self._path, self._tokens = meta["path"], tokens
            self._wanted = _Numbers(wanted, np.dtype(np.uint8), 0, self.num_tokens) if wanted.exists() else None
            self._checksums: dict[str, int] = dict(meta["crc32"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(self.folder, error) from error

    def read(self, start: int, stop: int) -> tuple[Integers, npt.NDArray[np.bool_] | None]:
        """Copy the tokens ``[start, stop)``, int64 ``(n,)``, and where loss is wanted, bool ``(n,)``; None: all."""
        tokens = self._tokens.read(start, stop).astype(np.int64)
        return tokens, None if self._wanted is None else self._wanted.read(start, stop).astype(np.bool_)

    def verify(self) -> None:
        """Read everything, about a gigabyte a second; raise ``UserError`` unless its checksums are as written."""
        found = _checksums(self.folder, self._path, self._tokens)
        for name in (name for name, checksum in self._checksums.items() if found.get(name) != checksum):
            raise damaged(self.folder, ValueError(f"the content of {name} is not what was written (its CRC32 differs)"))

    @property
    def has_answers(self) -> bool:
        """Return whether loss is wanted on some tokens only."""
        return self._wanted is not None

    @property
    def lengths(self) -> Integers:
        """Return the number of tokens of each document, ``(D,)``, in memory."""
        return np.diff(self.ends, prepend=0)

    @property
    def num_wanted(self) -> Integers:
        """Return the number of tokens of each document on which loss is wanted, ``(D,)``, in memory."""
        if self._wanted is None:
            return self.lengths
        wanted = self._wanted.read(0, self.num_tokens)
        return np.add.reduceat(wanted, self.ends - self.lengths, dtype=np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (self.folder,)

    @staticmethod
    def write(folder: str | Path, documents: Iterable[Encoded], vocab_size: int) -> "TokenStore":
        """Write ``documents`` one by one into a new ``folder``, leaving out those without tokens."""
        with TokenWriter(folder, vocab_size) as writer:
            for document in documents:
                writer.append(document)
        return TokenStore(folder)


class TokenWriter:
    """Write a :class:`TokenStore`, one document at a time; it is whole once the ``with`` block has ended. Eight bytes
    per document, and the files' buffers, are in memory."""

    def __init__(self, folder: str | Path, vocab_size: int) -> None:
        self.folder, self.vocab_size = Path(folder), vocab_size
        self.dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
        self.num_tokens, self.ends = 0, array("q")
        self.folder.mkdir(parents=True)
        self._tokens = (self.folder / "tokens.bin").open("wb")
        self._wanted = None

    def append(self, document: Encoded) -> None:
        tokens = np.asarray(document.tokens)
        if not len(tokens):
            return
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise ValueError(f"tokens must lie in [0, {self.vocab_size}), got {tokens.min()} to {tokens.max()}")
        self.ends.extend(self.num_tokens + end for end in document.ends or (len(tokens),))
        self._append(tokens, document.wanted)

    def extend(self, store: TokenStore, chunk: int = 2**20) -> None:
        """Append all documents of a store of the same vocabulary, ``chunk`` tokens at a time."""
        self.ends.frombytes((store.ends + self.num_tokens).tobytes())
        for start in range(0, store.num_tokens, chunk):
            self._append(*store.read(start, start + chunk))

    def _append(self, tokens: npt.NDArray[Any], wanted: npt.NDArray[np.bool_] | None) -> None:
        if wanted is not None and self._wanted is None:  # loss was wanted on all tokens before
            self._wanted = (self.folder / "wanted.bin").open("wb")
            for start in range(0, self.num_tokens, 2**22):
                self._wanted.write(b"\1" * min(2**22, self.num_tokens - start))
        self._tokens.write(tokens.astype(self.dtype).tobytes())
        if self._wanted is not None:
            self._wanted.write(np.asarray(np.ones(len(tokens)) if wanted is None else wanted, np.uint8).tobytes())
        self.num_tokens += len(tokens)

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._tokens.close()
        if self._wanted is not None:
            self._wanted.close()
        if kind is None:
            write_index(self.folder, np.frombuffer(self.ends, np.int64), self.vocab_size, self.dtype)


def write_index(
    folder: Path, ends: Integers, vocab_size: int, dtype: np.dtype[Any], path: str = "tokens.bin", offset: int = 0
) -> None:
    """Write ``ends.npy`` and then ``store.json``, without which a folder is no store. ``offset`` is in bytes."""
    with (folder / "ends.npy").open("wb") as file:  # np.save would not say why it failed
        np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": ends.shape})
        file.write(ends.astype("<i8", copy=False).data)
    num_tokens = int(ends[-1]) if len(ends) else 0
    checksums = _checksums(folder, path, _Numbers(folder / path, dtype, offset, num_tokens))
    meta = {"num_tokens": num_tokens, "vocab_size": vocab_size, "dtype": dtype.str, "path": path, "offset": offset}
    (folder / _FILE).write_text(json.dumps(meta | {"crc32": checksums}))


def damaged(folder: Path, error: Exception) -> UserError:
    """Return the sentence about prepared data that are not as they were written; ``folder`` is one split or all."""
    whole = folder.parent if folder.name in ("train", "val") else folder
    return UserError(
        f"{folder} should be a folder of prepared tokens, but it cannot be read: "
        f"{' '.join(str(error).split()) or type(error).__name__}; delete {whole}, and the next run prepares it again"
    )


class _Numbers:
    """``count`` numbers in a file, read and not mapped: a file cut meanwhile would end the process by SIGBUS."""

    def __init__(self, file: Path, dtype: np.dtype[Any], offset: int, count: int) -> None:
        self.file, self.dtype, self.offset, self.count = file, dtype, offset, count
        self._stream = file.open("rb", buffering=0)
        size, end = os.fstat(self._stream.fileno()).st_size, offset + count * dtype.itemsize
        if not 0 <= offset <= end <= size:
            raise ValueError(f"{file.name} has {size} bytes, not the {end} that store.json tells of")

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return a copy of the numbers ``[start, stop)``; as with a slice, there may be fewer at the end."""
        start, stop = (min(max(edge, 0), self.count) * self.dtype.itemsize for edge in (start, stop))
        content = os.pread(self._stream.fileno(), stop - start, self.offset + start) if stop > start else b""
        while len(content) < stop - start:  # the system reads 2 GiB at a time
            more = os.pread(self._stream.fileno(), stop - start - len(content), self.offset + start + len(content))
            if not more:
                raise UserError(
                    f"{self.file} was cut while it was read: it ends before byte {self.offset + stop}; restore it, or "
                    "delete the folder of prepared data, and resume from the last checkpoint (ckpt_path=...)"
                )
            content += more
        return np.frombuffer(content, self.dtype)


def _checksums(folder: Path, path: str, tokens: _Numbers) -> dict[str, int]:
    """Return the CRC32 of each file of a store, by its name; of another program's array, of the part that is read."""
    extents = {"ends.npy": (0, sys.maxsize), "wanted.bin": (0, sys.maxsize)}
    extents[path] = (tokens.offset, tokens.count * tokens.dtype.itemsize)
    found: dict[str, int] = {}
    for name, (offset, left) in extents.items():
        if (folder / name).exists():
            found[name] = 0
            with (folder / name).open("rb", buffering=0) as stream:
                stream.seek(offset)
                while content := stream.read(min(left, 2**20)):
                    found[name], left = zlib.crc32(content, found[name]), left - len(content)
    return found
