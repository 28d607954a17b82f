"""Write files and folders that appear whole or not at all, and find the whole ones that a killed run left.

What is written lies beside its place, with ".partial" added to its name, and is renamed when it is complete.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lit_fused.errors import UserError

REST = "meta.pt"  # in the folder of a checkpoint, everything that is no tensor; written last
WRITING = "while writing "  # the beginning of a note in an error, before the path
_PREVIOUS = ".previous"


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield the path to write to: after the ``with`` block, the file or folder there becomes ``path``. A block that
    fails leaves nothing."""
    partial = partial_of(path)
    remove(partial)
    with removed_on_failure(partial):
        yield partial
        put_in_place(partial, path)


def partial_of(path: Path) -> Path:
    """Return where ``path`` is written before it is complete."""
    return path.with_name(path.name + ".partial")


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

    A folder that replaces a folder takes two renames. Between them the previous one has ".previous" added to its name,
    where :func:`whole_checkpoint` finds it.
    """
    previous = path.with_name(path.name + _PREVIOUS)
    if path.is_dir() and not path.is_symlink():
        remove(previous)
        path.rename(previous)
    elif partial.is_dir():
        path.unlink(missing_ok=True)
    os.replace(partial, path)
    remove(previous)


def remove(path: Path) -> None:
    """Delete a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def whole_checkpoint(path: str | Path) -> Path:
    """Return the local path at which a checkpoint is whole: its own or, where a run was killed while it replaced the
    folder, that of the previous one. Raises UserError if there is none."""
    path = Path(path)
    for place in (path, path.with_name(path.name + _PREVIOUS)):
        if place.is_file() or (place / REST).is_file():
            return place
    if path.is_dir():
        raise UserError(f"{path} is a folder without {REST}, and no checkpoint; give a file or folder NAME.ckpt")
    raise UserError(f"there is no {path}")


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the paths of the whole checkpoints in a folder."""
    found = (*folder.glob("*.ckpt"), *folder.glob("*.ckpt" + _PREVIOUS))
    return [*filter(is_whole, {path.with_name(path.name.removesuffix(_PREVIOUS)) for path in found})]


def newest_in(folder: Path) -> Path | None:
    """Return the whole checkpoint that was written last into a folder, or None without one."""
    return newest_of(checkpoints_in(folder))


def newest_of(paths: Iterable[str | Path]) -> Path | None:
    """Return the whole checkpoint that was written last of those at some paths, or None without one."""

    def written(path: str | Path) -> float:
        place = whole_checkpoint(path)
        return (place / REST if place.is_dir() else place).stat().st_mtime

    newest = max(filter(is_whole, paths), key=written, default=None)
    return None if newest is None else Path(newest)


def is_whole(path: Any) -> bool:
    """Return whether there is a whole checkpoint at a local path."""
    with suppress(UserError):
        return bool(whole_checkpoint(path))
    return False
