"""Read text that is tokens already: flat arrays on the disk, as nanoGPT and NumPy write them.

Nothing is copied: the prepared folder holds where documents end, found by one pass over the array, and points at it.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lit_fused.data.cache import digest, prepare_once
from lit_fused.data.option_checks import stat_of_file
from lit_fused.data.preparation_report import Report, read_report, show_progress, write_report
from lit_fused.data.store import Integers, write_index
from lit_fused.errors import UserError, check_choice, checked_options

FORMAT_VERSION = 1  # raise it whenever the same array would be prepared differently
_CHUNK = 2**22  # tokens; an even number, so that [1::2] of each chunk takes every second of all
_DTYPES = ("uint16", "uint32")
Array = np.memmap[Any, Any]


class TokenArrays:
    """One file of tokens, or one to train on and one to hold out.

    Args:
        path: A ``.bin`` file of nothing but little-endian tokens, or a ``.npy`` file of one dimension.
        vocab_size: Every token is below it.
        val_path: Validation tokens. None: the last ``val_fraction`` of ``path``, from the nearest end of a document on.
        dtype: The type in ``.bin`` files: ``uint16`` or ``uint32``.
        eos_token_id: Ends each document. None: the tokenizer's end-of-text token; without one, all is one document.

    ``prepare`` raises UserError for a file that is no such array or has a token not below ``vocab_size``.
    """

    @checked_options("data.", vocab_size=2, eos_token_id=0)
    def __init__(
        self,
        path: str | Path,
        vocab_size: int,
        val_path: str | Path | None = None,
        dtype: str = "uint16",
        eos_token_id: int | None = None,
    ) -> None:
        check_choice("data.dtype", dtype, _DTYPES)
        self.path = Path(path).expanduser().absolute()
        self.val_path = None if val_path is None else Path(val_path).expanduser().absolute()
        self.name, self.vocab_size, self.eos_token_id = str(self.path), vocab_size, eos_token_id
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if eos_token_id is not None and eos_token_id >= vocab_size:
            raise UserError(f"data.eos_token_id must be below data.vocab_size={vocab_size}; got {eos_token_id}")

    def prepare(self, cache_dir: Path, val_fraction: float, tokenizer_eos: object = None, *, show: bool) -> Report:
        """Find where documents end, unless ``cache_dir`` has it, and return the report."""
        arrays = {path: self._open(path) for path in (self.path, self.val_path) if path is not None}
        eos = next((token for token in (self.eos_token_id, tokenizer_eos) if isinstance(token, int)), None)
        inputs = _described(arrays)
        key = digest(
            arrays=inputs,
            vocab_size=self.vocab_size,
            eos_token_id=eos,
            val_fraction=val_fraction if self.val_path is None else None,
            version=FORMAT_VERSION,
        )
        folder = cache_dir / f"tokens-{key}"

        def make(result: Path) -> None:
            start, total = time.perf_counter(), sum(map(len, arrays.values()))
            with show_progress(f"looking for the ends of documents in {self.path}", total, shown=show) as advance:
                ends = {path: self._ends(path, array, eos, advance) for path, array in arrays.items()}
            report = Report(source=str(self.path), folder=str(folder), vocab_size=self.vocab_size)
            report.pieces = {"total": 1, "resumed": 0}
            if self.val_path is None:
                train_ends, val_ends = _split(ends[self.path], val_fraction)
                first = int(train_ends.max(initial=0))
                splits = {"train": (self.path, 0, train_ends), "val": (self.path, first, val_ends - first)}
            else:
                splits = {side: (path, 0, ends[path]) for side, path in (("train", self.path), ("val", self.val_path))}
            for side, (path, first, ends_of_split) in splits.items():
                (result / side).mkdir()
                dtype, offset = arrays[path].dtype, arrays[path].offset + first * arrays[path].dtype.itemsize
                write_index(result / side, ends_of_split, self.vocab_size, dtype, str(path), offset)
                report.documents[side], report.tokens[side] = len(ends_of_split), int(ends_of_split.max(initial=0))
            if _described(arrays) != inputs:
                raise UserError(f"{self.name} was changed while it was being prepared; run again")
            report.seconds = time.perf_counter() - start
            write_report(result, report)

        cached = prepare_once(folder, make)
        return read_report(folder, cached=cached)

    def _open(self, path: Path) -> Array:
        expected = "data.path must be a .bin file of tokens or a one-dimensional .npy file of whole numbers"
        if path.suffix not in (".bin", ".npy"):
            raise UserError(f"{expected}; got {path}")
        stat_of_file(path)
        try:
            array = np.load(path, "r") if path.suffix == ".npy" else np.memmap(path, self.dtype, "r")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise UserError(f"{expected}, but {path} cannot be read: {reason}") from error
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise UserError(f"{expected}; {path} has the shape {array.shape} and the type {array.dtype}")
        if len(array) < 2:
            raise UserError(f"{path} holds {len(array)} token(s), too few to train on; give a longer one")
        return array

    def _ends(self, path: Path, tokens: Array, eos: int | None, advance: Callable[[int], None]) -> Integers:
        """Return the index after each end-of-text token, and after the last token: int64 ``(D,)``."""
        found = [np.empty(0, np.int64)]
        largest_second = 0
        for start in range(0, len(tokens), _CHUNK):
            chunk = np.fromfile(path, tokens.dtype, _CHUNK, offset=tokens.offset + start * tokens.dtype.itemsize)
            if len(chunk) < min(_CHUNK, len(tokens) - start):
                raise UserError(f"{path} was cut while it was read; run again when it is whole")
            lowest, highest = int(chunk.min()), int(chunk.max())
            if lowest < 0 or highest >= self.vocab_size:
                raise UserError(
                    f"{path} holds the token {lowest if lowest < 0 else highest}, and data.vocab_size="
                    f"{self.vocab_size}: set data.vocab_size to that of the tokenizer that made it, and data.dtype to "
                    "its type"
                )
            largest_second = max(largest_second, int(chunk[1::2].max(initial=0)))
            if eos is not None:
                found.append(np.flatnonzero(chunk == eos) + start + 1)
            advance(len(chunk))
        if tokens.dtype.itemsize == 2 and len(tokens) >= 64 and largest_second <= (self.vocab_size - 1) >> 16:
            raise UserError(
                f"every second token of {path} is at most {largest_second}: these are the halves of four-byte "
                "tokens; set data.dtype=uint32"
            )
        ends = np.concatenate(found)
        return ends if len(ends) and ends[-1] == len(tokens) else np.append(ends, len(tokens))


def _described(arrays: dict[Path, Array]) -> list[list[Any]]:
    stats = [(path, path.stat(), array.dtype.str) for path, array in arrays.items()]
    return [[str(path), stat.st_size, stat.st_mtime_ns, dtype] for path, stat, dtype in stats]


def _split(ends: Integers, val_fraction: float) -> tuple[Integers, Integers]:
    """Divide the ends: the tail, from the nearest end of a document on, is held out; a single document is cut."""
    if val_fraction in (0, 1):  # all of it is on one side
        return (ends, ends[:0]) if val_fraction == 0 else (ends[:0], ends)
    num_tokens = int(ends[-1])
    kept = num_tokens - min(max(1, int(val_fraction * num_tokens)), num_tokens - 1)
    if len(ends) == 1:
        return np.array([kept]), ends
    last = int(np.abs(ends[:-1] - kept).argmin())
    return ends[: last + 1], ends[last + 1 :]
