"""Prepare a folder once, however many processes ask for it and whenever one of them is killed.

Everything is written into a hidden work folder, under a lock that the kernel releases when a process is killed, and
gets its final name by one atomic rename. A folder with the final name is therefore complete. A second process waits
for the first. The next process goes on from what a killed one has left in the work folder, or clears it away.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from lit_fused.errors import UserError

_LOCK = "lock"


def default_cache_dir() -> Path:
    """Return ``$XDG_CACHE_HOME/lit_fused``, or ``~/.cache/lit_fused`` where the variable is unset or empty."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lit_fused"


def digest(**parameters: object) -> str:
    """Return 32 hexadecimal digits that change with any of the (JSON) parameters."""
    return hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()[:32]


@contextmanager
def work_folder(
    cache_dir: Path, name: str, waiting: Callable[[], None] = lambda: None, keep: Callable[[Path], bool] | None = None
) -> Iterator[Path]:
    """Yield the folder ``.{name}.work`` of ``cache_dir`` to this process alone, and delete it when the block ends.

    The folder holds what a killed process has left there, if any. If another process has it, call ``waiting`` and wait.
    If the block raises and ``keep(folder)`` is true, the folder stays for a later process.

    Raises:
        UserError: ``cache_dir`` cannot be created or written.
    """
    folder = cache_dir / f".{name}.work"
    lock = FileLock(folder / _LOCK)
    try:
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
                break
            except Timeout:
                waiting()
            try:
                lock.acquire()
                break
            except FileNotFoundError:  # the other process has finished and deleted the folder
                continue
    except OSError as error:
        raise UserError(
            f"the cache folder {cache_dir} cannot be written: {error.strerror}; set data.cache_dir to a folder that can"
        ) from error
    kept = False
    try:
        yield folder
    except BaseException:
        kept = keep is not None and keep(folder)
        raise
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def prepare_once(folder: Path, prepare: Callable[[Path], None]) -> None:
    """Call ``prepare(temporary)`` and rename the result to ``folder``, unless that exists.

    Raises:
        UserError: The folder's parent cannot be created or written.
    """
    if os.path.isdir(folder):  # False also where permission is lacking
        return
    with work_folder(folder.parent, folder.name) as work:
        if folder.is_dir():
            return
        temporary = work / "result"
        shutil.rmtree(temporary, ignore_errors=True)  # a killed process may have left it
        temporary.mkdir()
        prepare(temporary)
        try:
            os.rename(temporary, folder)
        except OSError:  # where locks do not reach (another machine on a network file system), it may be there by now
            if not folder.is_dir():
                raise
