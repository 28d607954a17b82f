"""Find bytes of a checkpoint that changed since they were written, and say in one sentence why one cannot be read."""

import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from torch.distributed.checkpoint.api import CheckpointException

from lit_fused.checkpoints.whole_or_not import METADATA, checkpoint_fault
from lit_fused.errors import UserError

_CHECKSUM = "metadata.crc32"  # of .metadata, which is no zip archive and so has none of its own


def check_bytes(file: Any) -> None:
    """Compare all that ``torch.save`` wrote to a file with its checksums, which ``torch.load`` does not; BadZipFile."""
    with ZipFile(file) as archive:
        if (damaged := archive.testzip()) is not None:
            raise BadZipFile(f"the checksum of {damaged} does not match")


def write_checksum(folder: Path) -> None:
    """Write the checksum of a folder's list of tensors beside it."""
    (folder / _CHECKSUM).write_text(f"{zlib.crc32((folder / METADATA).read_bytes()):08x}\n")


def checked_metadata(folder: Path) -> bytes:
    """Return a folder's list of tensors as it was written; BadZipFile if a byte of it changed."""
    content, checksum = (folder / METADATA).read_bytes(), folder / _CHECKSUM
    if checksum.is_file() and checksum.read_text().strip() != f"{zlib.crc32(content):08x}":
        raise BadZipFile(f"the checksum of {METADATA} does not match")
    return content


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Raise whatever reading a checkpoint raises as one UserError, which names a neighbour to use in its place."""
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, CheckpointException) as error:  # torch raises any kind for damaged bytes
        # In torch.distributed each rank hears of the failures of all ranks.
        failures = [error] if not isinstance(error, CheckpointException) else [e for e, _ in error.failures.values()]
        cause = next((failure for failure in failures if isinstance(failure, UserError)), failures[0])
        raise cause if isinstance(cause, UserError) else unreadable(path, cause) from error


def unreadable(path: str | Path, cause: BaseException | str) -> UserError:
    """Return the sentence that says why a checkpoint cannot be read."""
    path = Path(path)
    text = cause if isinstance(cause, str) else f"{cause}".strip().split("\n")[0].rstrip(".") or type(cause).__name__
    named = re.search(r"GLOBAL (\S+)", f"{cause}") if isinstance(cause, UnpicklingError) else None
    if text.startswith("Missing key in checkpoint"):  # what torch says of an entry that is not in the list of tensors
        missing = text.rpartition(" ")[2]
        return UserError(f"{path} has no {missing}; configure model and optimizer as in the run that wrote it")
    if isinstance(cause, PermissionError):
        fault = "cannot be read (permission denied)"
    elif named:
        fault = f"is not opened: it names {named[1]}, and a checkpoint has tensors and plain values alone"
    elif path.is_dir() or (path.is_file() and path.open("rb").read(2) in (b"PK", b"")):
        fault = f"is damaged ({text})"
    else:
        fault = f"is no checkpoint of a Lightning run ({text})"
    others = [p for p in path.parent.glob("*.ckpt") if checkpoint_fault(p) is None and not p.samefile(path)]
    such_as = f", such as {max(others, key=lambda p: p.stat().st_mtime)}" if others else ""
    return UserError(f"{path} {fault}; use another checkpoint{such_as}")
