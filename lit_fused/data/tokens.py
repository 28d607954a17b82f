"""The data module of text that is tokens already: flat arrays on the disk, as nanoGPT and NumPy write them.

Nothing is copied: the prepared folder holds where documents end, found by one pass over the array, and points at it.
"""

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_fused.data.cache import digest, prepare_once
from lit_fused.data.module import TokenDataModule
from lit_fused.data.packing import Packing
from lit_fused.data.preparation import Report, full_disk_said, read_report, write_report
from lit_fused.data.progress import Advance, show_progress
from lit_fused.data.store import write_index
from lit_fused.errors import UserError

FORMAT_VERSION = 1  # raise it whenever the same array would be prepared differently
_CHUNK = 2**22  # tokens
_DTYPES = ("uint16", "uint32")


class TokensDataModule(TokenDataModule):
    """Packed blocks of tokens that somebody has made before.

    Args:
        path: A ``.bin`` file of nothing but little-endian tokens, or a ``.npy`` file of one dimension.
        vocab_size: Every token is below it.
        val_path: The same, of the validation tokens. None: the last ``val_fraction`` of ``path``, from the nearest end
            of a document on.
        dtype: Of ``.bin`` files: ``uint16`` or ``uint32``.
        eos_token_id: Each document ends with this token. None: the tokenizer's end-of-text token; without a tokenizer,
            the whole is one document.
        tokenizer: The name or folder of the tokenizer that the tokens are of; samples of text and the exported model
            need it.

    The other arguments are :class:`~lit_fused.data.module.TokenDataModule`'s.

    Raises:
        UserError: A value is out of range, at construction; ``prepare_data`` and ``setup`` raise it for a file that is
            missing, no such array, or holds a token that is not below ``vocab_size``.
    """

    kind = "tokens"
    min_vocab_size = 2

    def __init__(
        self,
        path: str | Path,
        vocab_size: int,
        val_path: str | Path | None = None,
        dtype: str = "uint16",
        eos_token_id: int | None = None,
        block_size: int = 256,
        batch_size: int = 8,
        val_fraction: float = 0.05,
        tokenizer: str | Path | None = None,
        cache_dir: str | Path | None = None,
        num_workers: int = 0,
        packing: Packing = "stream",
        seed: int = 0,
    ) -> None:
        super().__init__(
            block_size=block_size,
            batch_size=batch_size,
            val_fraction=val_fraction,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            max_bad_documents=0,
            cache_dir=cache_dir,
            num_workers=num_workers,
            prepare_workers=0,
            packing=packing,
            seed=seed,
        )
        if dtype not in _DTYPES:
            raise UserError(f"data.dtype must be one of {', '.join(_DTYPES)}; got {dtype!r}")
        self.path = Path(path).expanduser().absolute()
        self.val_path = None if val_path is None else Path(val_path).expanduser().absolute()
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.eos_token_id = eos_token_id

    def prepare(self, *, show: bool = False) -> Report:
        """Find where documents end, unless the cache knows it. See :meth:`TokenDataModule.prepare`."""
        arrays = [_TokenArray.open(path, self.dtype) for path in (self.path, self.val_path) if path is not None]
        given = self.given_tokenizer()
        eos = self.eos_token_id
        if eos is None and given is not None and isinstance(given.eos_token_id, int):
            eos = given.eos_token_id
        key = digest(
            arrays=[array.fingerprint for array in arrays],
            vocab_size=self.max_vocab_size,
            eos_token_id=eos,
            val_fraction=self.val_fraction if self.val_path is None else None,
            version=FORMAT_VERSION,
        )
        folder = self.cache_dir / f"{self.kind}-{key}"
        if not folder.is_dir():
            with full_disk_said(self.cache_dir):
                prepare_once(folder, partial(self._write, arrays, eos, folder, show))
            return read_report(folder)
        return replace(read_report(folder), cached=True)

    def _write(self, arrays: list["_TokenArray"], eos: int | None, folder: Path, show: bool, result: Path) -> None:
        start = time.perf_counter()
        total = sum(array.num_tokens for array in arrays)
        with show_progress(f"looking for the ends of documents in {self.path}", total, shown=show) as bar:
            ends = [array.ends(eos, self.max_vocab_size, bar) for array in arrays]
        report = Report(str(self.path), str(folder), vocab_size=self.max_vocab_size, pieces={"total": 1, "resumed": 0})
        if self.val_path is None:
            [whole], [ends_of_whole] = arrays, ends
            train_ends, val_ends = _split(ends_of_whole, self.val_fraction)
            val_start = int(train_ends[-1])
            splits = {"train": (whole, 0, train_ends), "val": (whole, val_start, val_ends - val_start)}
        else:
            splits = {side: (arrays[i], 0, ends[i]) for i, side in enumerate(("train", "val"))}
        for side, (array, first, ends_of_split) in splits.items():
            (result / side).mkdir()
            offset = array.offset + first * array.dtype.itemsize
            write_index(result / side, ends_of_split, self.max_vocab_size, array.dtype, str(array.path), offset)
            report.documents[side], report.tokens[side] = len(ends_of_split), int(ends_of_split[-1])
        report.seconds = time.perf_counter() - start
        write_report(result, report)


@dataclass(frozen=True)
class _TokenArray:
    """``num_tokens`` tokens in a file, behind ``offset`` bytes."""

    path: Path
    dtype: np.dtype[Any]
    offset: int
    num_tokens: int
    fingerprint: Any

    @staticmethod
    def open(path: Path, dtype: np.dtype[Any]) -> "_TokenArray":
        """Look at the file's size, or its header. ``dtype`` is that of a ``.bin`` file."""
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
        """The index behind each end-of-text token, and behind the last token: int64 ``(D,)``.

        Raises:
            UserError: A token is not below ``vocab_size``, or two-byte tokens look like the halves of longer ones.
        """
        tokens = np.memmap(self.path, self.dtype, "r", self.offset, (self.num_tokens,))
        found: list[npt.NDArray[np.int64]] = []
        largest_second = 0
        for start in range(0, self.num_tokens, _CHUNK):  # an even number: every second token is one of all
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
    """The ends of what is trained on and of what is held out: the tail, from the nearest end of a document on.

    A single document is cut.
    """
    num_tokens = int(ends[-1])
    kept = num_tokens - min(max(1, int(val_fraction * num_tokens)), num_tokens - 1)
    if len(ends) == 1:
        return np.array([kept]), ends
    last = int(np.abs(ends[:-1] - kept).argmin())
    return ends[: last + 1], ends[last + 1 :]
