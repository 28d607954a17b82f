"""Read tokens through the page cache as one stream of documents: of an Arrow table, or of an array on the disk."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
from datasets import Dataset

from lit_fused.errors import UserError, check_choice, checked_options

Integers = npt.NDArray[np.int64]
pc: Any = pyarrow.compute  # Its functions are made when it is imported.
_CHUNK = 2**22  # tokens


class Tokens:
    """Some documents, one after the other.

    Args:
        tokens: Arrays, of which the stream is a part.
        loss_mask: As ``tokens``, the weight of each token's loss, 0 where none is wanted; None: 1 everywhere.
        starts, lengths: Of each document in ``tokens``, (D,).
        vocab_size: Every token is below it.

    ``ends``, int64 (D,), is the index in the stream after each document's last token.
    """

    opened_by: Any = None  # a function and its arguments, by which another process opens them

    def __init__(
        self,
        tokens: Sequence[Any],
        loss_mask: Sequence[Any] | None,
        starts: Integers,
        lengths: Integers,
        vocab_size: int,
    ) -> None:
        self.lengths, self.ends, self.vocab_size = lengths, np.cumsum(lengths), vocab_size
        self.num_documents, self.num_tokens = len(lengths), int(lengths.sum())
        self._tokens, self._loss_mask = (
            None if part is None else pa.chunked_array(part) for part in (tokens, loss_mask)
        )
        # Neighbours are read at once: where such a run begins in the stream, and how far that is from there.
        begins = np.append(True, starts[1:] != (starts + lengths)[:-1])[: len(starts)]
        self._runs = (self.ends - lengths)[begins]
        self._shifts = starts[begins] - self._runs

    @classmethod
    def of(cls, table: Dataset, held_out: bool, vocab_size: int) -> "Tokens":
        """Return one side of what :func:`lit_fused.data.tokenized.tokenized` has made."""
        columns: Any = table.with_format("arrow")[:]
        lengths = pc.list_value_length(columns["input_ids"]).to_numpy().astype(np.int64)
        chosen = (columns["held_out"].to_numpy() == held_out) & (lengths > 0)
        starts = np.cumsum(lengths) - lengths
        tokens, loss_mask = (
            [chunk.flatten() for chunk in columns[name].chunks] if name in columns.column_names else None
            for name in ("input_ids", "loss_mask")
        )
        found = cls(tokens or [], loss_mask, starts[chosen], lengths[chosen], vocab_size)
        found.opened_by = (cls.of, (table, held_out, vocab_size))
        return found

    def __reduce__(self) -> Any:
        return self.opened_by or super().__reduce__()

    @property
    def has_answers(self) -> bool:
        """Return whether loss is wanted on some tokens only."""
        return self._loss_mask is not None

    @cached_property
    def num_wanted(self) -> Integers:
        """Return the number of tokens of each document on which loss is wanted, (D,)."""
        if self._loss_mask is None:
            return self.lengths
        is_wanted = self._read(self._loss_mask, 0, self.num_tokens) != 0
        return np.add.reduceat(is_wanted, self.ends - self.lengths, dtype=np.int64)

    def read(self, start: int, stop: int) -> tuple[Integers, npt.NDArray[np.bool_] | None]:
        """Copy the tokens [start, stop), int64 (n,), and where loss is wanted, bool (n,); None: everywhere.
        As with a slice, there may be fewer at the end."""
        tokens = self._read(self._tokens, start, stop).astype(np.int64)
        return tokens, None if self._loss_mask is None else self._read(self._loss_mask, start, stop).astype(np.bool_)

    def weights(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Return the weights of the loss of the tokens [start, stop), (n,)."""
        if self._loss_mask is None:
            return np.ones(min(stop, self.num_tokens) - start, np.float32)
        return self._read(self._loss_mask, start, stop).astype(np.float32)

    def _read(self, array: Any, start: int, stop: int) -> npt.NDArray[Any]:
        parts, stop = [np.empty(0, np.uint8)], min(stop, self.num_tokens)
        run = int(np.searchsorted(self._runs, start, side="right")) - 1
        while start < stop:
            end = stop if run + 1 == len(self._runs) else min(stop, int(self._runs[run + 1]))
            parts.append(array.slice(start + int(self._shifts[run]), end - start).to_numpy())
            start, run = end, run + 1
        return np.concatenate(parts)


class TokenArrays:
    """Text that is tokens already, in a file that is read where it lies.

    Args:
        path: A ``.bin`` file of nothing but little-endian tokens, as nanoGPT writes it, or a ``.npy`` file.
        vocab_size: Every token is below it.
        dtype: The type in ``.bin`` files: ``uint16`` or ``uint32``.
        eos_token_id: Ends each document. None: the tokenizer's end-of-text token; without one, all is one document.
    """

    @checked_options("data.", vocab_size=2, eos_token_id=0)
    def __init__(
        self,
        path: str | Path,
        vocab_size: int,
        dtype: str = "uint16",
        eos_token_id: int | None = None,
    ) -> None:
        check_choice("data.dtype", dtype, ("uint16", "uint32"))
        if dtype == "uint16" and vocab_size > 2**16:  # Halves of tokens would be read as tokens.
            raise UserError(f"data.vocab_size={vocab_size} needs tokens of four bytes; set data.dtype=uint32")
        self.path, self.vocab_size, self.dtype, self.eos_token_id = path, vocab_size, dtype, eos_token_id

    def open(self, val_fraction: float, eos_token_id: int | None = None) -> tuple[Tokens, Tokens]:
        """Return what to train on and what is held out: the last ``val_fraction``, from the nearest end of a document
        on; 0 and 1 put all on one side. UserError for tokens that are not below ``vocab_size``."""
        file = Path(self.path).expanduser()
        array = np.load(file, "r") if file.suffix == ".npy" else np.memmap(file, self.dtype, "r")
        if array.ndim != 1 or array.dtype.kind not in "iu" or len(array) < 2:
            raise UserError(f"{file} should be one row of tokens; it has shape {array.shape} and type {array.dtype}")
        eos = eos_token_id if self.eos_token_id is None else self.eos_token_id
        ends = self._ends(array, eos)
        kept = len(array) - min(max(1, int(val_fraction * len(array))), len(array) - 1)
        if val_fraction in (0, 1):
            kept = 0 if val_fraction else len(array)
        elif len(ends) > 1:
            kept = int(ends[np.abs(ends[:-1] - kept).argmin()])
        ends = np.union1d(ends, [kept])[kept == 0 :]  # A document that is cut is two.
        starts, is_train = np.append(0, ends[:-1]), ends <= kept
        sides = (Tokens([array], None, starts[s], (ends - starts)[s], self.vocab_size) for s in (is_train, ~is_train))
        return next(sides), next(sides)

    def _ends(self, array: npt.NDArray[Any], eos: int | None) -> Integers:
        """Return the index after each document."""
        ends = [np.array([len(array)])]
        for start in range(0, len(array), _CHUNK):
            chunk = array[start : start + _CHUNK]
            if chunk.min() < 0 or chunk.max() >= self.vocab_size:
                raise UserError(
                    f"{self.path} has tokens from {chunk.min()} to {chunk.max()}, and data.vocab_size="
                    f"{self.vocab_size}; set it to that of the tokenizer that made them, and data.dtype to their type"
                )
            if eos is not None:
                ends.append(np.flatnonzero(chunk == eos) + start + 1)
        return np.unique(np.concatenate(ends))
