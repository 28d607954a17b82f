"""Give a run its folder: to one process at a time, cleared of what killed processes left, and with nothing to lose.

The lock belongs to the kernel and ends with its process. All of this happens before Hydra writes into the folder.
"""

import csv
import os
import re
import socket
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from errno import ENOLCK, ENOSYS, EOPNOTSUPP
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from lit_fused.app.fine_tuning import with_rate
from lit_fused.app.plain_yaml import plain_yaml
from lit_fused.atomic import newest_in, remove, removed_on_failure
from lit_fused.errors import UserError, resuming

LOCK, HOLDER, RESUMED = ".lock", ".holder", ".hydra/resumed"
_RESULTS = ("checkpoints", "metrics.csv", "summary.json", "exported")
_FILES = ("metrics.csv", "summary.json", "environment.json", "report.html", "error.txt", "train.log", "multirun.yaml")
_FOLDERS = ("checkpoints", "exported", ".hydra")
_TEMPORARY = re.compile(r"\.(holder|(environment|summary|report|metrics|plan)\.\w+)\.\d+")
_PROBE = bytes(2**16)  # A run's first small files take as much.

_locks: dict[Path, FileLock] = {}  # This process has them.


def take(folder: Path, choose: str) -> None:
    """Create and lock a folder, and clear what killed processes left. UserError, ending in ``choose``, if it cannot be
    written, another process has it, or other files have the names of its own."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(_PROBE)
        _lock(folder, choose)
        with suppress(NotADirectoryError):
            remove(folder / RESUMED)  # A refused command left it; of a stranger's run it may be a link to elsewhere.
        for path in (*folder.glob(".*"), *folder.glob("*.partial"), *folder.glob("checkpoints/*.partial")):
            if path.suffix == ".partial" or _TEMPORARY.fullmatch(path.name):
                remove(path)
    except OSError as error:
        raise UserError(f"The output folder {folder} cannot be written ({error.strerror}). {choose}") from None
    for names, kind, fits in ((_FILES, "file", os.path.isfile), (_FOLDERS, "folder", os.path.isdir)):
        for path in (folder / name for name in names):
            if os.path.lexists(path) and not (fits(path) and os.access(path, os.W_OK)):
                raise UserError(f"{path} is in the way: it is no {kind} that a run can write. Move it away. {choose}")


def _lock(folder: Path, choose: str) -> None:
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        # The other process writes it just after it has got the lock.
        holder = (folder / HOLDER).read_text().strip() if (folder / HOLDER).is_file() else "its process is unknown"
        raise UserError(
            f"The folder {folder} is in use by another run ({holder}). Wait until that ends. {choose}"
        ) from None
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in (ENOSYS, ENOLCK, EOPNOTSUPP):
            raise
        return  # some network file systems have no locks
    _locks[folder] = lock
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    write_whole(folder / HOLDER, f"process {os.getpid()} on {socket.gethostname()}, since {now}\n".encode())


def in_use(folder: Path) -> bool | None:
    """Return whether a process of this machine has the folder; None if that cannot be known here. It is asked by its
    number, because a lock that is tried could refuse a run that starts at this moment."""
    holder = folder / HOLDER
    found = re.match(r"process (\d+) on (.*), since", holder.read_text()) if holder.is_file() else None
    if found is None or found[2] != socket.gethostname():
        return None
    if int(found[1]) == os.getpid():
        return folder in _locks
    try:
        with suppress(PermissionError):  # another user's
            os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return False
    return True


def give_back(folder: Path) -> None:
    """Let other processes have a folder that this process may have taken."""
    if folder in _locks:
        _locks.pop(folder).release()


def results_in(folder: Path) -> list[str]:
    found = (folder / name for name in _RESULTS)
    return [path.name for path in found if path.is_file() or (path.is_dir() and any(path.iterdir()))]


def check_nothing_is_replaced(folders: Iterable[Path], ckpt_path: Path | None, choose: str) -> None:
    """Raise UserError if a fit would replace results of another run than that of ``ckpt_path``, absolute."""
    for folder in folders:
        results = results_in(folder)
        if not results or (ckpt_path and ckpt_path.resolve().is_relative_to(folder.resolve())):
            continue
        newest = newest_in(folder / "checkpoints")
        go_on = f" Resume that run with {resuming(newest)}, or empty the folder." if newest else " Empty the folder."
        raise UserError(
            f"{folder} has a run already, and this one would replace its {', '.join(results)}.{go_on} {choose}"
        )


def fitted(folder: Path) -> bool:
    """Return whether a folder has the results of a fit, and not those of another mode alone."""
    config = folder / ".hydra" / "config.yaml"
    mode = re.search(r"^mode: (\w+)", config.read_text(encoding="utf-8"), re.MULTILINE) if config.is_file() else None
    return bool(results_in(folder)) and (mode is None or mode[1] == "fit")


def adopt_configuration(folder: Path) -> None:
    """Replace the configuration of a run by that of the command that goes on with it, which has not been refused. Its
    overrides come on top of the run's own."""
    with suppress(FileNotFoundError):
        new = [line for line in overrides_in(folder / RESUMED) if not line.startswith("ckpt_path=")]
        lines = {line.partition("=")[0].lstrip("+"): line for line in [*overrides_in(folder / ".hydra"), *new]}
        for path in (folder / RESUMED).iterdir():
            os.replace(path, folder / ".hydra" / path.name)
        (folder / RESUMED).rmdir()
        write_whole(
            folder / ".hydra" / "overrides.yaml",
            yaml.safe_dump([*lines.values()], width=2**31, allow_unicode=True).encode(),
        )


def overrides_in(folder: Path) -> list[str]:
    """Return the overrides that Hydra has written into a folder; none if they are not there, or are damaged."""
    try:
        found = yaml.safe_load(plain_yaml((folder / "overrides.yaml").read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError):
        return []
    return [*map(str, found)] if isinstance(found, list) else []


def write_whole(path: Path, content: bytes) -> None:
    """Replace the file in one step. Nothing is left of a file that cannot be written."""
    temporary = path.with_name(f".{path.name.removeprefix('.')}.{os.getpid()}")
    with removed_on_failure(temporary):
        temporary.write_bytes(content)
        os.replace(temporary, path)


def read_run_file(folder: Path) -> dict[str, Any]:
    """Return the overrides and the configuration of a run; {} if they are not there, or are damaged."""
    with suppress(OSError, ValueError, yaml.YAMLError):
        config = yaml.safe_load(plain_yaml((folder / ".hydra" / "config.yaml").read_text(encoding="utf-8")))
        return {
            "overrides": overrides_in(folder / ".hydra"),
            "config": with_rate(config) if isinstance(config, dict) else {},
        }
    return {"overrides": overrides_in(folder / ".hydra")}


def metric_rows(folder: Path) -> list[dict[str, str]]:
    """Return the rows of ``metrics.csv``; none if it cannot be read."""
    with suppress(OSError, ValueError, csv.Error), (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return [*csv.DictReader(file)]
    return []
