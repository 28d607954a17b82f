"""Prepare a folder once, however many processes ask for it and whenever one of them is killed.

Everything is written into a hidden work folder, under a lock that the kernel releases when a process is killed, and
gets its final name by one atomic rename. A folder with the final name is therefore complete. A second process waits for
the first. The next one goes on from what a killed one has left in its work folder, and clears other such folders away.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from lit_fused.errors import UserError


def default_cache_dir() -> Path:
    """Return ``$XDG_CACHE_HOME/lit_fused``, or ``~/.cache/lit_fused`` where the variable is unset or empty."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lit_fused"


def digest(**parameters: object) -> str:
    """Return 32 hexadecimal digits that change with any of the (JSON) parameters."""
    return hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()[:32]


def prepare_once(
    folder: Path, prepare: Callable[[Path], None], work_name: str = "", waiting: Callable[[], None] = lambda: None
) -> bool:
    """Call ``prepare(empty folder)`` and rename that to ``folder``, unless this exists; return whether it did.

    The parent of the empty folder is a work folder, ``.{work_name}.work`` or that of ``folder``'s name, which this
    process has alone: ``waiting`` is called before it waits for another one. It holds what a killed process has left
    there, and is deleted at the end, unless an error ends ``prepare`` and there are finished pieces, or a signal does
    and there is a tokenizer. UserError if the folder's parent cannot be created or written, or is full.
    """
    work = folder.parent / f".{work_name or folder.name}.work"
    is_there = os.path.isdir(folder)  # False also where permission is lacking
    for lock in folder.parent.glob(".*.work/lock"):  # Others are no work of ours, and a run names any cache folder.
        if lock.parent != work or is_there:  # What a living process has locked stays.
            with suppress(OSError, Timeout), FileLock(lock, timeout=0):
                shutil.rmtree(lock.parent, ignore_errors=True)
    if is_there:
        return True
    result, kept = work / "result", False
    own_lock = _lock(work, waiting)
    try:
        if folder.is_dir():
            return True
        shutil.rmtree(result, ignore_errors=True)  # a killed process may have left it
        result.mkdir()
        prepare(result)
        try:
            os.rename(result, folder)
        except OSError:  # Another machine, which no lock reaches, may have made it meanwhile.
            if not folder.is_dir():
                raise
        return False
    except BaseException as error:  # A signal raises SystemExit.
        shutil.rmtree(result, ignore_errors=True)
        kept = any((work / "pieces").glob("*/outcome.json"))
        if not isinstance(error, Exception):  # An error may lie in the data, of which the tokenizer was made.
            kept = kept or any(path.suffix != ".partial" for path in work.glob("tokenizer-*"))
        reasons = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)]
        # The tokenizers library raises plain exceptions.
        reason = next((reason for reason in reasons if reason in str(error)), None)
        if reason is None or isinstance(error, UserError):
            raise
        raise UserError(
            f"the cache folder {folder.parent} is full ({reason}): finished pieces are kept, nothing else; "
            "make room and run again, or set data.cache_dir to a folder with more"
        ) from error
    finally:
        if not kept:
            shutil.rmtree(work, ignore_errors=True)
        own_lock.release()


def _lock(work: Path, waiting: Callable[[], None]) -> FileLock:
    lock, timeout = FileLock(work / "lock"), 0
    try:
        while True:
            with suppress(FileExistsError):  # It was deleted before mkdir saw that it is a folder.
                work.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=timeout)
                return lock
            except Timeout:
                waiting()
                timeout = -1  # wait for ever
            except (FileExistsError, FileNotFoundError):  # the other process has finished and deleted the folder
                if work.is_file() or work.is_symlink():
                    raise
    except OSError as error:
        raise UserError(
            f"the cache folder {work.parent} cannot be written: {error.strerror}; set data.cache_dir to a folder that "
            "can"
        ) from error
