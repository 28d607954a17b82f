"""Prepare a folder once, however many processes ask for it and whenever one of them is killed.

The one trick: everything is written into a hidden work folder beside it, under a lock that the kernel takes back from
a killed process, and appears under its final name by one atomic rename. A folder that bears the final name is
therefore complete. Who comes second waits, and finds it. What a killed process has left in the work folder is there
for the next one: to go on from, or to clear away.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from lit_fused.errors import UserError

_LOCK = "lock"


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/lit_fused``, or ``~/.cache/lit_fused`` where the variable is unset or empty."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lit_fused"


def digest(**parameters: object) -> str:
    """32 hexadecimal digits that change with any of the (JSON) parameters."""
    return hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()[:32]


def content_key(documents: Iterable[str], **parameters: object) -> str:
    """32 hexadecimal digits that change with any byte of a document, with their order, or with a (JSON) parameter."""
    key = hashlib.sha256(json.dumps(parameters, sort_keys=True).encode())
    for document in documents:
        key.update(hashlib.sha256(document.encode()).digest())
    return key.hexdigest()[:32]


@contextmanager
def work_folder(
    cache_dir: Path, name: str, waiting: Callable[[], None] = lambda: None, keep: Callable[[Path], bool] | None = None
) -> Iterator[Path]:
    """The folder ``.{name}.work`` of ``cache_dir``, for this process alone until the block ends; then it is deleted.

    It holds what a killed process has left there, if any. Another process that has it is waited for; ``waiting`` is
    called first. When the block raises and ``keep(folder)`` is true, the folder stays, for a later process to go on.

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
    """Make sure that ``folder`` exists, complete: unless it does, call ``prepare(temporary)`` and rename the result.

    Raises:
        UserError: The folder's parent cannot be created or written.
    """
    if os.path.isdir(folder):  # False also where permission is lacking
        return
    with work_folder(folder.parent, folder.name) as work:
        if folder.is_dir():
            return
        temporary = work / "result"
        shutil.rmtree(temporary, ignore_errors=True)  # of a killed process
        temporary.mkdir()
        prepare(temporary)
        try:
            os.rename(temporary, folder)
        except OSError:  # where locks do not reach (another machine on a network file system), it may be there by now
            if not folder.is_dir():
                raise
