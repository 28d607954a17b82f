"""Say what a run's folder has: its overrides and configuration, and what it has logged.

``run.json`` is written when a run begins.
"""

import csv
import fcntl
import itertools
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lit_fused.app.ranks import is_first_rank, job_of_cluster, may_be_requeued
from lit_fused.atomic import newest_in, remove, removed_on_failure
from lit_fused.errors import UserError, resuming

RUN_FILE = "run.json"
_RESULTS = ("checkpoints", "metrics.csv", "summary.json", "exported")
_OF_THE_BEGINNING = {RUN_FILE, "error.txt", "train.log", "metrics.csv"}


def new_folder(path: str) -> str:
    """Make a folder, of another name if a run has one that began in the same second, and return its path. Further ranks
    get the path as it is: Lightning tells those that it starts the first one's."""
    place = path
    for number in itertools.count(2) if is_first_rank() else ():
        with suppress(FileExistsError):
            Path(place).mkdir(parents=True)
            return place
        place = f"{path}-{number}"
    return path


def is_of_this_job(folder: Path) -> bool:
    """Return whether a folder has the run of an earlier attempt of this job, which was put into the queue again."""
    return may_be_requeued() and read_run_file(folder).get("job") == job_of_cluster()


def claim(folder: Path, content: Mapping[str, Any], ckpt_path: str | None) -> int:
    """Lock a run's folder, write ``run.json`` into it, and set aside the metrics of a run that goes on in it.

    Return the descriptor of the folder, which is locked until that is closed.

    Args:
        content: "overrides", "cwd", "flags" (of a configuration of the user's own) and "config".
        ckpt_path: of a fit, which goes on in its folder if the checkpoint lies in it.

    Raises UserError if the folder has another run, or another process writes into it.
    """
    goes_on = ckpt_path is not None and Path(ckpt_path).resolve().is_relative_to(folder.resolve())
    goes_on |= is_of_this_job(folder)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = _locked(folder)
    has_failed = (folder / "error.txt").is_file()  # Without results, another run may take its place.
    if not goes_on and any((folder / name).exists() for name in (*_RESULTS, *[RUN_FILE] * (not has_failed))):
        os.close(descriptor)
        newest = newest_in(folder / "checkpoints")
        resume = f"resume it with {resuming(newest)}, or " if newest else ""
        raise UserError(f"{folder} has a run already; {resume}choose another folder with hydra.run.dir=FOLDER")
    for path in (*folder.glob("*.partial"), *folder.glob("checkpoints/*.partial")):  # A killed process left it.
        remove(path)
    (folder / "error.txt").unlink(missing_ok=True)
    if goes_on and (folder / "metrics.csv").is_file():  # Lightning's logger would delete it.
        os.replace(folder / "metrics.csv", folder / f"metrics.{len(_parts(folder))}.csv")
    content = {**content, "job": job_of_cluster()}
    write_whole(folder / RUN_FILE, (json.dumps(content, indent=1, default=str) + "\n").encode())
    return descriptor


def _locked(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UserError(
            f"{folder} has a run already, of a process that writes into it; wait for its end, or choose another folder "
            "with hydra.run.dir=FOLDER"
        ) from error
    except OSError:  # Some network file systems have no locks.
        pass
    return descriptor


def leave_nothing(folder: Path, *, claimed: bool) -> None:
    """Remove the folder of a run that was refused before its first step, or of a mode that writes nothing."""
    with suppress(OSError):
        has_losses = any("/loss" in name and value for row in metric_rows(folder) for name, value in row.items())
        if not has_losses and {path.name for path in folder.iterdir()} <= (_OF_THE_BEGINNING if claimed else set()):
            shutil.rmtree(folder)
            if folder.absolute().parent != Path.cwd():
                folder.parent.rmdir()  # of the day, if this was its only run


def read_run_file(folder: Path) -> dict[str, Any]:
    """Return the content of ``run.json``: "overrides", "cwd", "flags" and "config"; {} if it is absent or damaged."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads((folder / RUN_FILE).read_bytes())
        if isinstance(found, dict) and isinstance(found.get("overrides"), list):
            return found
    return {}


def metric_rows(folder: Path) -> list[dict[str, str]]:
    """Return the rows that have a step of ``metrics.csv``, and of the files that were set aside when the run went on.

    What was logged after the step at which a run went on is left out, and so is what it has logged again.
    """
    rows: list[dict[str, str]] = []
    for part in _parts(folder):
        with suppress(csv.Error), part.open(encoding="utf-8", errors="replace", newline="") as file:
            new = [row for row in csv.DictReader(file) if (row.get("step") or "").isdecimal()]
            again = {(row["step"], name) for row in new for name in _logged(row)}
            first = min((int(row["step"]) for row in new), default=0)
            old = [r for r in rows if int(r["step"]) <= first and not {(r["step"], n) for n in _logged(r)} & again]
            rows = [*old, *new] if new else rows
    return rows


def _parts(folder: Path) -> list[Path]:
    """Return the files of a run's metrics in the order in which they were written."""
    earlier = sorted(folder.glob("metrics.*.csv"), key=lambda path: int("0" + path.suffixes[0][1:]))
    return [*earlier, *filter(Path.is_file, [folder / "metrics.csv"])]


def _logged(row: Mapping[str, str]) -> set[str]:
    return {name for name, value in row.items() if value and name not in ("step", "epoch")}


def write_whole(path: Path, content: bytes) -> None:
    """Replace the file in one step. Nothing is left of a file that cannot be written."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with removed_on_failure(temporary):
        temporary.write_bytes(content)
        os.replace(temporary, path)


OmegaConf.register_new_resolver("new_folder", new_folder, use_cache=True, replace=True)
