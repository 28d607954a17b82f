"""Write checkpoints so that a killed run leaves whole ones, and recognise those that are not.

A checkpoint is written beside the previous one and renamed when it is complete.
"""

import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lit_fused.errors import UserError

METADATA, REST = ".metadata", "meta.pt"  # torch's list of all tensors, and Lightning's other values, written last
_PREVIOUS = ".previous"
WRITING = "while writing "  # the beginning of a note in an error, before the path
_READ_UNQUOTED = re.compile(r"(?a)[\w/:@%+.-]+( +[\w/:@%+.-]+)*")  # by Hydra, in a value


def checkpoint_fault(path: str | Path) -> str | None:
    """Return why there is no whole checkpoint at a local path; None if there is one. Only file names are looked at.

    A run that is killed while it replaces a folder has moved that folder aside, which gets its name back here.
    """
    path = Path(path)
    if not path.exists():
        previous = path.with_name(path.name + _PREVIOUS)
        fault = ""
        if previous.is_dir() and not checkpoint_fault(previous):
            try:
                previous.rename(path)
            except OSError as error:
                fault = (
                    f"; {previous} is whole, a run was killed while it replaced it, and it cannot get its name back "
                    f"({error.strerror}); rename it"
                )
        if not path.exists():  # nor was another rank quicker
            return f"there is no {path}{fault}"
    missing = [name for name in (METADATA, REST) if not (path / name).is_file()]
    if path.is_dir() and missing:
        return (
            f"{path} is a folder without {' and '.join(missing)}, not a whole checkpoint: its run was killed while it "
            "wrote it, or it is another folder; give a checkpoint, such as its neighbour in the same folder"
        )
    return None


def check_whole(path: str | Path) -> None:
    """Raise UserError if there is no whole checkpoint at a local path."""
    fault = checkpoint_fault(path)
    if fault:
        raise UserError(fault)


def newest_in(folder: Path) -> Path | None:
    """Return the last whole checkpoint that was written into a folder, or None without one."""

    def written(path: Path) -> float:
        return (path / REST if path.is_dir() else path).stat().st_mtime

    return max((path for path in folder.glob("*.ckpt") if checkpoint_fault(path) is None), key=written, default=None)


def resuming(checkpoint: str | Path) -> str:
    """Return the word of a command, as a shell takes it, that resumes from a checkpoint: Hydra reads other characters
    than plain ones in quotes only."""
    path = str(checkpoint)
    if not _READ_UNQUOTED.fullmatch(path):
        path = '"' + re.sub(r'(\\*)"', r'\1\1\\"', path) + '"'
    return shlex.quote(f"ckpt_path={path}")


@contextmanager
def written_whole(path: Path, *, is_first: bool = True, wait: Callable[[], Any] = lambda: None) -> Iterator[Path]:
    """Yield the path to write to: after the ``with`` block, the file or folder there becomes ``path``.

    A block that fails leaves nothing. Where several ranks write one folder, the first gives it its name; ``wait`` is
    their barrier.
    """
    partial = path.with_name(path.name + ".partial")
    if is_first:
        remove(partial)
    wait()
    with removed_on_failure(partial):
        yield partial
        wait()
        if is_first:
            put_in_place(partial, path)
    wait()


@contextmanager
def removed_on_failure(partial: Path) -> Iterator[None]:
    """Remove what a failed block has written, and name it in the error."""
    try:
        yield
    except BaseException as error:  # A signal raises SystemExit.
        error.add_note(f"{WRITING}{partial}")
        with suppress(OSError):
            remove(partial)
        raise


def put_in_place(partial: Path, path: Path) -> None:
    """Rename a complete file or folder to ``path``, in place of what is there.

    A folder takes two renames. Between them the previous folder is at ``path`` with ".previous" added.
    """
    previous = path.with_name(path.name + _PREVIOUS)
    if not path.is_dir():
        if partial.is_dir():
            path.unlink(missing_ok=True)
        os.replace(partial, path)
        remove(previous)  # A run was killed between the two renames.
        return
    remove(previous)
    path.rename(previous)
    try:
        partial.rename(path)
    except OSError:  # A process that wanted to read it meanwhile has given the previous one its name back.
        put_in_place(partial, path)
    remove(previous)


def remove(path: Path) -> None:
    """Delete a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
