"""Store the tokens of many documents on the disk, and read them through the page cache.

A split is one flat array of tokens and the index at which each document ends. It is memory-mapped: any number of
processes read it, none holds it, and only the disk limits its size. Packing needs only the ends.

    store.json    describes the others: {"num_tokens", "vocab_size", "dtype", "path", "offset"}
    tokens.bin    tokens, little-endian: uint16 for a vocabulary of at most 65,536 entries, else uint32
    ends.npy      int64 (D,): document d is the tokens [ends[d - 1], ends[d])
    wanted.bin    one byte per token: 1 where loss is wanted. Absent where it is wanted everywhere

``path`` in ``store.json`` is ``tokens.bin``, or the array of another program, which is not copied; reading skips its
first ``offset`` bytes.

D documents, N tokens.
"""

import json
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_fused.errors import UserError

_FILE = "store.json"


@dataclass(frozen=True)
class Encoded:
    """The tokens of one document, its end-of-text token among them if it has one.

    Attributes:
        tokens: ``(n,)`` integers. A document without any is left out, and counted.
        wanted: ``(n,)`` bool, True where loss is wanted; None: everywhere.
        notes: What a person should know of it ("cut to 4096 tokens"); the preparation's report counts each.
        ends: The index after the last token of each, if it is stored as several documents; None: it is one.
    """

    tokens: npt.NDArray[np.integer[Any]]
    wanted: npt.NDArray[np.bool_] | None = None
    notes: tuple[str, ...] = ()
    ends: tuple[int, ...] | None = None


class TokenStore:
    """The documents of one split, memory-mapped. It pickles as its folder's name, so that loader workers map it anew.

    Attributes:
        folder: Where it lies.
        num_documents, num_tokens: How much there is.
        vocab_size: Every token is below it.
        ends: int64 ``(D,)``, strictly increasing: the index after each document's last token.

    Raises:
        UserError: The folder is no store, or its files are not as long as ``store.json`` says.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            meta = json.loads((self.folder / _FILE).read_text())
            self.ends: npt.NDArray[np.int64] = np.load(self.folder / "ends.npy", mmap_mode="r")
            self.num_documents = len(self.ends)
            self.num_tokens: int = meta["num_tokens"]
            self.vocab_size: int = meta["vocab_size"]
            self._tokens = _mapped(self.folder / meta["path"], np.dtype(meta["dtype"]), meta["offset"], self.num_tokens)
            wanted = self.folder / "wanted.bin"
            self._wanted = _mapped(wanted, np.dtype(np.uint8), 0, self.num_tokens) if wanted.exists() else None
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"{self.folder} should be a folder of prepared tokens, but it cannot be read: {error}; "
                "delete it, and the next run prepares it again"
            ) from error

    def read(self, start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_] | None]:
        """Copy the tokens ``[start, stop)``, int64 ``(n,)``, and where loss is wanted, bool ``(n,)``; None: all."""
        tokens = self._tokens[start:stop].astype(np.int64)
        return tokens, None if self._wanted is None else self._wanted[start:stop].astype(np.bool_)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each document, ``(D,)``, in memory."""
        return np.diff(self.ends, prepend=0)

    @property
    def num_wanted(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each document on which loss is wanted, ``(D,)``, in memory."""
        if self._wanted is None:
            return self.lengths
        return np.add.reduceat(self._wanted, self.ends - self.lengths, dtype=np.int64)

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
    """Write a :class:`TokenStore`, one document at a time; it is whole once the ``with`` block has ended.

    Eight bytes per document, and the files' buffers, are in memory.
    """

    def __init__(self, folder: str | Path, vocab_size: int) -> None:
        self.folder = Path(folder)
        self.vocab_size = vocab_size
        self.dtype = token_dtype(vocab_size)
        self.num_tokens = 0
        self._ends = array("q")
        self.folder.mkdir(parents=True)
        self._tokens = (self.folder / "tokens.bin").open("wb")
        self._wanted = None

    @property
    def num_documents(self) -> int:
        return len(self._ends)

    def append(self, document: Encoded) -> None:
        tokens = np.asarray(document.tokens)
        if not len(tokens):
            return
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise ValueError(f"tokens must lie in [0, {self.vocab_size}), got {tokens.min()} to {tokens.max()}")
        ends = (len(tokens),) if document.ends is None else document.ends
        self._ends.extend(self.num_tokens + end for end in ends)
        self._append(tokens.astype(self.dtype).tobytes(), document.wanted, len(tokens))

    def extend(self, store: TokenStore, chunk: int = 2**20) -> None:
        """Append all documents of a store of the same vocabulary, ``chunk`` tokens at a time."""
        self._ends.frombytes((store.ends + self.num_tokens).tobytes())
        for start in range(0, store.num_tokens, chunk):
            tokens, wanted = store.read(start, min(start + chunk, store.num_tokens))
            self._append(tokens.astype(self.dtype).tobytes(), wanted, len(tokens))

    def _append(self, tokens: bytes, wanted: npt.NDArray[np.bool_] | None, count: int) -> None:
        if wanted is not None and self._wanted is None:  # loss was wanted on all tokens before
            self._wanted = (self.folder / "wanted.bin").open("wb")
            for start in range(0, self.num_tokens, 2**22):
                self._wanted.write(b"\1" * min(2**22, self.num_tokens - start))
        self._tokens.write(tokens)
        if self._wanted is not None:
            self._wanted.write(b"\1" * count if wanted is None else np.asarray(wanted, np.uint8).tobytes())
        self.num_tokens += count

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self._tokens.close()
        if self._wanted is not None:
            self._wanted.close()
        if kind is None:
            ends = np.frombuffer(self._ends, np.int64)
            write_index(self.folder, ends, self.vocab_size, self.dtype)


def write_index(
    folder: Path,
    ends: npt.NDArray[np.int64],
    vocab_size: int,
    dtype: np.dtype[Any],
    path: str = "tokens.bin",
    offset: int = 0,
) -> None:
    """Write ``ends.npy`` and then ``store.json``, without which a folder is no store. ``offset`` is in bytes."""
    with (folder / "ends.npy").open("wb") as file:  # np.save would not say why it failed
        np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": ends.shape})
        file.write(ends.astype("<i8", copy=False).data)
    num_tokens = int(ends[-1]) if len(ends) else 0
    meta = {"num_tokens": num_tokens, "vocab_size": vocab_size, "dtype": dtype.str, "path": path, "offset": offset}
    (folder / _FILE).write_text(json.dumps(meta))


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return uint16 if it holds every token below ``vocab_size``, else uint32."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def _mapped(file: Path, dtype: np.dtype[Any], offset: int, count: int) -> npt.NDArray[Any]:
    size, needed = file.stat().st_size, offset + count * dtype.itemsize
    if size < needed:
        raise ValueError(f"{file} has {size:,} bytes, but {needed:,} are needed")
    return np.memmap(file, dtype, "r", offset, (count,)) if count else np.empty(0, dtype)
