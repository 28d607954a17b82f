"""Read what runs left in their folders. What is missing or damaged is left out: no file of one run ends the report of
all.

``summary.json`` is of a run that ended well, ``error.txt`` says why one failed, and a killed one has neither. Runs are
named by the overrides that differ between them.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_fused.app.run_folder import metric_rows, read_run_file
from lit_fused.atomic import newest_in
from lit_fused.errors import Stopped, UserError, resuming

ABSENT = "–"  # noqa: RUF001 (an en dash: the empty cell)


@dataclass(frozen=True)
class Run:
    """One run: ``metrics`` has the last values, ``curves`` points (step, value), ``configuration`` is flat."""

    name: str
    status: str  # completed, planned, failed or unfinished
    error: str  # a sentence about a failed or unfinished run
    overrides: dict[str, str]
    ran_as: str  # the stand-in for a loss that cannot run here
    metrics: dict[str, float]
    curves: dict[str, list[tuple[int, float]]]
    samples: dict[str, str]
    configuration: dict[str, Any]
    environment: dict[str, Any]

    def values(self, keys: Iterable[str]) -> list[str]:
        stand_in = f" (ran as {self.ran_as})" if self.ran_as else ""
        return [self.overrides.get(key, ABSENT) + stand_in * (key == "loss") for key in keys]


def run_folders(sweep: Path) -> list[Path]:
    """Return the folders of a sweep's runs, numbered ones by their numbers."""
    found = [file.parent for file in sweep.glob("**/run.json")]
    own = [folder for folder in found if not any(parent in found for parent in folder.parents)]
    return sorted(own, key=lambda folder: (int(folder.name) if folder.name.isdecimal() else math.inf, str(folder)))


def read_runs(sweep: Path) -> list[Run]:
    return [read_run(folder, folder.relative_to(sweep).as_posix()) for folder in run_folders(sweep)]


def read_run(folder: Path, name: str = "") -> Run:
    started, summary = read_run_file(folder), {}
    with suppress(OSError, ValueError):
        summary = _dict(json.loads((folder / "summary.json").read_text(encoding="utf-8")))
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in metric_rows(folder):  # Each fills only the columns that were logged together.
        for key, cell in row.items():
            with suppress(ValueError, TypeError, KeyError):
                if key not in ("step", "epoch") and math.isfinite(value := float(cell)):
                    curves.setdefault(key, []).append((int(row["step"]), value))
    lines = started.get("overrides")
    pairs = [str(line).partition("=") for line in (lines if isinstance(lines, list) else [])]
    content = _dict(started.get("config"))
    place = json.dumps(str(content.get("output_dir") or "RUN"))[1:-1]  # It differs from run to run wherever it stands.
    config = dict(_flat(json.loads(json.dumps(content).replace(place, "RUN"))))
    ran, status, error = summary.get("loss"), str(summary.get("status")), ""
    if status not in ("completed", "planned"):
        status, error = _end_of(folder, curves)
    return Run(
        name=name or folder.name,
        status=status,
        error=error,
        overrides={key.lstrip("+"): value for key, _, value in pairs},
        ran_as=str(ran) if ran not in (None, config.get("loss.impl", ran)) else "",
        metrics={
            key: float(value) if isinstance(value, int | float) else math.nan  # JSON has null for it
            for key, value in _dict(summary.get("metrics")).items()
        },
        curves=curves,
        samples={key: str(text) for key, text in _dict(summary.get("samples")).items()},
        configuration=config,
        environment=_dict(summary.get("environment")),
    )


def _end_of(folder: Path, curves: Mapping[str, list[tuple[int, float]]]) -> tuple[str, str]:
    with suppress(OSError, ValueError):
        return "failed", (folder / "error.txt").read_text(encoding="utf-8").strip()
    steps, newest = [points[-1][0] for points in curves.values()], newest_in(folder / "checkpoints")
    known = f"the last step in metrics.csv is {max(steps)}" if steps else "it has logged no step"
    return "unfinished", f"it runs or was killed; {known}" + (f"; resume it with {resuming(newest)}" if newest else "")


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _flat(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items() if isinstance(node, dict) else ():
        name = f"{path}.{key}".lstrip(".")
        yield from _flat(value, name) if isinstance(value, dict) and value else [(name, value)]


def differing(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ. A mapping that is empty is of a run that left none, and does not count."""
    known = [mapping for mapping in mappings if mapping]
    keys = dict.fromkeys(key for mapping in known for key in mapping)
    return [key for key in keys if len({str(mapping.get(key, ABSENT)) for mapping in known}) > 1]


def by_configuration(runs: list[Run]) -> list[list[Run]]:
    """Return the runs in groups that differ in the seed alone."""
    keys, groups = [key for key in differing(run.overrides for run in runs) if key != "seed"], {}
    for run in runs:
        groups.setdefault(tuple(run.overrides.get(key) for key in keys), []).append(run)
    return list(groups.values())


def record_failure(path: Path, error: BaseException) -> None:
    """Write why a run ended, unless another rank has failed before and has written it."""
    # Lightning turns Ctrl-C into SystemExit.
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
        sentence = "interrupted"
    elif isinstance(error, Stopped | UserError):
        sentence = getattr(error, "sentence", str(error))
    else:
        sentence = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")[:1000]
    with suppress(OSError), path.open("x", encoding="utf-8", errors="backslashreplace") as file:
        file.write(sentence + "\n")
