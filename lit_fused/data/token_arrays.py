"""Read text that is tokens already: flat arrays on the disk, as nanoGPT and NumPy write them.

Nothing is copied: the prepared folder holds where documents end, found by one pass over the array, and points at it.
"""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_fused.data.cache import digest, prepare_once
from lit_fused.data.option_checks import check_int
from lit_fused.data.preparation import explain_full_disk
from lit_fused.data.preparation_progress import Advance, show_progress
from lit_fused.data.preparation_report import Report, read_report, write_report
from lit_fused.data.store import write_index
from lit_fused.errors import UserError

FORMAT_VERSION = 1  # raise it whenever the same array would be prepared differently
_CHUNK = 2**22  # tokens
_DTYPES = ("uint16", "uint32")


class TokenArrays:
    """One file of tokens, or one to train on and one to hold out.

    Args:
        path: A ``.bin`` file of nothing but little-endian tokens, or a ``.npy`` file of one dimension.
        vocab_size: Every token is below it.
        val_path: A file of validation tokens. None: the last ``val_fraction`` of ``path``, from the nearest end of a
            document on.
        dtype: The type in ``.bin`` files: ``uint16`` or ``uint32``.
        eos_token_id: Each document ends with this token. None: the tokenizer's end-of-text token; without a tokenizer,
            the whole is one document.

    Raises:
        UserError: A value is out of range; ``prepare`` raises it for a file that is missing, no such array, or holds a
            token that is not below ``vocab_size``.
    """

    def __init__(
        self,
        path: str | Path,
        vocab_size: int,
        val_path: str | Path | None = None,
        dtype: str = "uint16",
        eos_token_id: int | None = None,
    ) -> None:
        check_int("data.vocab_size", vocab_size, 2)
        if dtype not in _DTYPES:
            raise UserError(f"data.dtype must be one of {', '.join(_DTYPES)}; got {dtype!r}")
        self.path = Path(path).expanduser().absolute()
        self.val_path = None if val_path is None else Path(val_path).expanduser().absolute()
        self.vocab_size = vocab_size
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.eos_token_id = eos_token_id

    def prepare(self, cache_dir: Path, val_fraction: float, tokenizer_eos: object = None, *, show: bool) -> Report:
        """Find where documents end, unless the cache has it, and return the report.

        Args:
            cache_dir: Where prepared folders lie.
            val_fraction: The share of the tokens that is held out.
            tokenizer_eos: The tokenizer's end-of-text token, if there is a tokenizer and it has one.
            show: Show the progress.
        """
        arrays = [_TokenArray.open(path, self.dtype) for path in (self.path, self.val_path) if path is not None]
        eos = self.eos_token_id
        if eos is None and isinstance(tokenizer_eos, int):
            eos = tokenizer_eos
        key = digest(
            arrays=[array.fingerprint for array in arrays],
            vocab_size=self.vocab_size,
            eos_token_id=eos,
            val_fraction=val_fraction if self.val_path is None else None,
            version=FORMAT_VERSION,
        )
        folder = cache_dir / f"tokens-{key}"
        cached = folder.is_dir()
        with explain_full_disk(cache_dir):
            prepare_once(folder, partial(self._write, arrays, eos, val_fraction, folder, show))
        return read_report(folder, cached=cached)

    def _write(
        self, arrays: list["_TokenArray"], eos: int | None, val_fraction: float, folder: Path, show: bool, result: Path
    ) -> None:
        start = time.perf_counter()
        total = sum(array.num_tokens for array in arrays)
        with show_progress(f"looking for the ends of documents in {self.path}", total, shown=show) as bar:
            ends = [array.ends(eos, self.vocab_size, bar) for array in arrays]
        report = Report(str(self.path), str(folder), vocab_size=self.vocab_size, pieces={"total": 1, "resumed": 0})
        if self.val_path is None:
            [whole], [ends_of_whole] = arrays, ends
            train_ends, val_ends = _split(ends_of_whole, val_fraction)
            val_start = int(train_ends[-1])
            splits = {"train": (whole, 0, train_ends), "val": (whole, val_start, val_ends - val_start)}
        else:
            splits = {side: (arrays[i], 0, ends[i]) for i, side in enumerate(("train", "val"))}
        for side, (array, first, ends_of_split) in splits.items():
            (result / side).mkdir()
            offset = array.offset + first * array.dtype.itemsize
            write_index(result / side, ends_of_split, self.vocab_size, array.dtype, str(array.path), offset)
            report.documents[side], report.tokens[side] = len(ends_of_split), int(ends_of_split[-1])
        report.seconds = time.perf_counter() - start
        write_report(result, report)


@dataclass(frozen=True)
class _TokenArray:
    """``num_tokens`` tokens in a file, after ``offset`` bytes."""

    path: Path
    dtype: np.dtype[Any]
    offset: int
    num_tokens: int
    fingerprint: Any

    @staticmethod
    def open(path: Path, dtype: np.dtype[Any]) -> "_TokenArray":
        """Read the file's size, or its header. ``dtype`` is that of a ``.bin`` file."""
        expected = "data.path must be a .bin file of tokens or a one-dimensional .npy file of whole numbers"
        try:
            stat = path.stat()
            if path.suffix == ".npy":
                array = np.load(path, mmap_mode="r")
                if array.ndim != 1 or array.dtype.kind not in "iu":
                    raise UserError(f"{expected}; {path} has the shape {array.shape} and the type {array.dtype}")
                dtype, offset, num_tokens = array.dtype, array.offset, len(array)
            elif path.suffix == ".bin":
                offset, (num_tokens, rest) = 0, divmod(stat.st_size, dtype.itemsize)
                if rest:
                    raise UserError(f"{path} has {stat.st_size} bytes, which are no whole number of {dtype} tokens")
            else:
                raise UserError(f"{expected}; got {path}")
        except FileNotFoundError:
            raise UserError(f"{expected}, but {path} does not exist") from None
        except (OSError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{expected}, but {path} cannot be read: {error}") from error
        if num_tokens < 2:
            raise UserError(f"{path} holds {num_tokens} token(s), too few to train on; give a longer one")
        fingerprint = [str(path), stat.st_size, stat.st_mtime_ns, dtype.str]
        return _TokenArray(path, dtype, offset, num_tokens, fingerprint)

    def ends(self, eos: int | None, vocab_size: int, progress: Advance) -> npt.NDArray[np.int64]:
        """Return the index after each end-of-text token, and after the last token: int64 ``(D,)``.

        Raises:
            UserError: A token is not below ``vocab_size``, or two-byte tokens look like the halves of longer ones.
        """
        tokens = np.memmap(self.path, self.dtype, "r", self.offset, (self.num_tokens,))
        found: list[npt.NDArray[np.int64]] = []
        largest_second = 0
        for start in range(
            0, self.num_tokens, _CHUNK
        ):  # each chunk has an even number of tokens, so that [1::2] takes every second of all
            chunk = tokens[start : start + _CHUNK]
            lowest, highest = int(chunk.min()), int(chunk.max())
            if lowest < 0 or highest >= vocab_size:
                wrong = lowest if lowest < 0 else highest
                raise UserError(
                    f"{self.path} holds the token {wrong}, and data.vocab_size={vocab_size}: "
                    "set data.vocab_size to that of the tokenizer that made it, and data.dtype to its type"
                )
            largest_second = max(largest_second, int(chunk[1::2].max(initial=0)))
            if eos is not None:
                found.append(np.flatnonzero(chunk == eos) + start + 1)
            progress.advance(len(chunk))
        if self.dtype.itemsize == 2 and self.num_tokens >= 64 and largest_second <= (vocab_size - 1) >> 16:
            raise UserError(
                f"every second token of {self.path} is at most {largest_second}: these are the halves of four-byte "
                "tokens; set data.dtype=uint32"
            )
        ends = np.concatenate([*found, np.empty(0, np.int64)])
        return ends if len(ends) and ends[-1] == self.num_tokens else np.append(ends, self.num_tokens)


def _split(ends: npt.NDArray[np.int64], val_fraction: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Divide the ends in those to train on and those to hold out: the tail, from the nearest end of a document on.

    A single document is cut.
    """
    num_tokens = int(ends[-1])
    kept = num_tokens - min(max(1, int(val_fraction * num_tokens)), num_tokens - 1)
    if len(ends) == 1:
        return np.array([kept]), ends
    last = int(np.abs(ends[:-1] - kept).argmin())
    return ends[: last + 1], ends[last + 1 :]
