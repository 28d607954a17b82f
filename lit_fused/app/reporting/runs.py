"""Read what runs left in their folders. What is missing or damaged is left out: no file of one run ends the report of
all.

``summary.json`` is of a run that ended well, ``error.txt`` says why one failed, and a killed one has neither.
"""

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lit_fused.app.run_folder import metric_rows, read_run_file
from lit_fused.atomic import newest_in
from lit_fused.errors import Stopped, UserError, resuming

ABSENT = "–"  # noqa: RUF001 (an en dash: the empty cell)


@dataclass(frozen=True)
class Run:
    """One run: ``metrics`` has the last values, ``curves`` points (step, value)."""

    name: str
    status: str  # completed, planned, failed or unfinished
    error: str  # a sentence about a failed or unfinished run
    overrides: dict[str, str]
    ran_as: str  # the stand-in for a loss that cannot run here
    metrics: dict[str, float]
    curves: dict[str, list[tuple[int, float]]]
    samples: dict[str, str]
    started_as: str  # environment and configuration, as YAML

    def values(self, keys: Iterable[str]) -> list[str]:
        stand_in = f" (ran as {self.ran_as})" if self.ran_as else ""
        return [self.overrides.get(key, ABSENT) + stand_in * (key == "loss") for key in keys]


def read_runs(sweep: Path) -> list[Run]:
    """Return the runs of a sweep, numbered ones by their numbers."""
    folders = [file.parent for file in sweep.glob("**/run.json")]
    order = sorted(folders, key=lambda folder: (int(folder.name) if folder.name.isdecimal() else math.inf, str(folder)))
    return [read_run(folder, folder.relative_to(sweep).as_posix()) for folder in order]


def read_run(folder: Path, name: str = "") -> Run:
    started, summary, curves = read_run_file(folder), _summary(folder), dict[str, list[tuple[int, float]]]()
    for row in metric_rows(folder):  # Each fills only the columns that were logged together.
        for key, cell in row.items():
            with suppress(ValueError, TypeError):
                if key not in ("step", "epoch") and math.isfinite(value := float(cell)):
                    curves.setdefault(key, []).append((int(row["step"]), value))
    pairs = (str(line).lstrip("+").partition("=") for line in started.get("overrides", []))
    content = {"environment": summary.get("environment"), "configuration": started.get("config")}
    status, error = (summary["status"], "") if summary else _end_of(folder, curves)
    return Run(
        name=name or folder.name,
        status=status,
        error=error,
        overrides={key: value for key, _, value in pairs},
        ran_as=str(summary.get("ran_as") or ""),
        metrics=summary.get("metrics", {}),
        curves=curves,
        samples=summary.get("samples", {}),
        started_as=yaml.safe_dump(content, sort_keys=False),
    )


def _summary(folder: Path) -> dict[str, Any]:
    """Return what a run that ended wrote, with NaN for null; {} if there is none, or a part of it is damaged."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        found = json.loads((folder / "summary.json").read_bytes())
        metrics = {key: math.nan if value is None else float(value) for key, value in found["metrics"].items()}
        samples = {key: str(text) for key, text in found.get("samples", {}).items()}
        return found | {"status": str(found["status"]), "metrics": metrics, "samples": samples}
    return {}


def _end_of(folder: Path, curves: Mapping[str, list[tuple[int, float]]]) -> tuple[str, str]:
    with suppress(OSError, ValueError):
        return "failed", (folder / "error.txt").read_text(encoding="utf-8").strip()
    steps, newest = [points[-1][0] for points in curves.values()], newest_in(folder / "checkpoints")
    known = f"the last step in metrics.csv is {max(steps)}" if steps else "it has logged no step"
    return "unfinished", f"it runs or was killed; {known}" + (f"; resume it with {resuming(newest)}" if newest else "")


def differing(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ. A mapping that is empty is of a run that left none, and does not count."""
    known = [mapping for mapping in mappings if mapping]
    keys = dict.fromkeys(key for mapping in known for key in mapping)
    return [key for key in keys if len({str(mapping.get(key, ABSENT)) for mapping in known}) > 1]


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
