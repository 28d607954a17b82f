"""Read a sweep's folder, and make tables of its runs.

A sweep has one folder per run, by default a numbered one. The sweep's folder has a list of the runs that have started,
which also names folders that ``hydra.sweep.subdir`` calls otherwise. A completed run wrote ``summary.json`` (its
overrides and last metrics). A run without it is running or failed, and has a row too: a baseline that ran out of memory
is a result. ``error.txt`` says why it failed; a killed process wrote none, and the sentence about it has the last step
that it logged. Lightning's ``metrics.csv`` has the training curve, also of failed runs.

Runs are labelled by the overrides that differ between them.
"""

import colorsys
import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from lit_fused.app.fine_tuning import with_rate
from lit_fused.app.plain_yaml import plain_yaml
from lit_fused.app.run_folder import in_use, overrides_in
from lit_fused.atomic import newest_in
from lit_fused.errors import resuming

_SPEED, _PEAK = "throughput/tokens_per_sec", "memory/peak_allocated_gib"
_RAN = " (ran as "  # a stand-in
ABSENT = "–"  # noqa: RUF001 (an en dash: the empty cell)

# (name in summary.json and the CSV, heading, number format); all but three are shown where a run has them
COLUMNS = [
    ("val/loss", "val loss", ".4f"),
    ("val/perplexity", "val perplexity", ",.2f"),
    ("val/reward_accuracy", "val reward accuracy", ".3f"),
    ("val/ndcg_at_10", "val NDCG@10", ".4f"),
    (_SPEED, "tokens/s", ",.0f"),
    ("throughput/mfu", "MFU", ".1%"),
    (_PEAK, "peak memory (GiB)", ".3f"),
]

# A curve can be drawn over each of these, by the name of its axis.
AXES = {"tokens seen": "throughput/tokens", "wall time (s)": "throughput/seconds"}

# Okabe and Ito's palette without its yellow (too pale for a line on white); safe for colour-blind readers.
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
DASHES = [(), (9, 4), (2, 2), (10, 3, 2, 3), (18, 4), (7, 2, 2, 2, 2, 2)]  # in points: on, off, on, ...
THINNEST = 1.6  # points
_LIST = ".runs"  # of a sweep: the name of each run's folder as JSON, one in a line
MOST_DRAWN = 40  # runs in a picture, or side by side in a table


@dataclass(frozen=True)
class Run:
    """One run of a sweep. ``name`` is that of its folder, ``metrics`` has the last value of each metric that it
    measured, ``error`` is a sentence about a run without a summary, ``config`` is the composed configuration, flat, and
    ``samples`` has texts by when they were made."""

    name: str
    folder: Path
    status: str
    overrides: dict[str, str]
    metrics: dict[str, float]
    error: str | None
    config: dict[str, Any]
    environment: dict[str, str]
    tokens: int = 0
    samples: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> tuple[float, float] | None:
        """Tokens per second and peak memory in GiB; None if one of them was not measured."""
        speed, peak = (self.metrics.get(name, math.nan) for name in (_SPEED, _PEAK))
        return (speed, peak) if math.isfinite(speed) and math.isfinite(peak) else None

    @property
    def peaks(self) -> dict[str, float]:
        """The peak memory of each phase that was measured, in GiB."""
        found = {phase: self.metrics.get(f"memory/{phase}_gib") for phase in ("forward", "backward", "optimizer")}
        return {phase: peak for phase, peak in found.items() if peak is not None}

    def values(self, keys: Iterable[str]) -> tuple[str, ...]:
        return tuple(self.overrides.get(key, ABSENT) for key in keys)


def read_runs(sweep_folder: Path) -> list[Run]:
    """Return the runs below ``sweep_folder`` in their order; none if the sweep never started one."""
    return [read_run(folder, folder.relative_to(sweep_folder).as_posix()) for folder in run_folders(sweep_folder)]


def list_run(sweep_folder: Path, folder: Path) -> None:
    """Make a run known to its sweep. Parallel jobs write to the same file, so a run adds its line in one piece."""
    if folder.is_relative_to(sweep_folder):
        with (sweep_folder / _LIST).open("a") as file:
            file.write(json.dumps(folder.relative_to(sweep_folder).as_posix()) + "\n")


def run_folders(sweep_folder: Path) -> list[Path]:
    """Return the folders of a sweep's runs: the numbered ones by number, others in the order in which they started."""
    others = [path for path in (sweep_folder / name for name in _listed(sweep_folder)) if path.is_dir()]
    return list(dict.fromkeys([*numbered_folders(sweep_folder), *others]))


def numbered_folders(sweep_folder: Path) -> list[Path]:
    folders = [path for path in sweep_folder.glob("*") if path.is_dir() and path.name.isdecimal()]
    return sorted(folders, key=lambda path: int(path.name))


def _listed(sweep_folder: Path) -> Iterator[str]:
    """Yield names that stay below the sweep's folder, whoever wrote its list."""
    for line in (_read(sweep_folder / _LIST, str) or "").splitlines():
        with suppress(ValueError):  # A full disk has cut it.
            name = json.loads(line)
            if isinstance(name, str) and Path(name).parts and not {"/", ".."} & {*Path(name).parts}:
                yield name


def read_run(folder: Path, name: str = "") -> Run:
    error, summary = None, _read(folder / "summary.json", _summary)
    if summary is None:
        error = _read(folder / "error.txt", str.strip)
        runs = False if error else in_use(folder)
        summary = {"status": "running" if runs else "failed", "overrides": [], "metrics": {}}
        error = error or _last_word(folder, runs)
    pairs = (str(line).partition("=") for line in overrides_in(folder / ".hydra") or summary["overrides"])
    overrides = {key.lstrip("+"): value for key, _, value in pairs}
    config = _read(folder / ".hydra" / "config.yaml", _from_yaml)
    config = dict(_flat(with_rate(config))) if isinstance(config, dict) else {}
    environment = _read(folder / "environment.json", json.loads)
    environment = environment if isinstance(environment, dict) else {}
    if seconds := summary.get("seconds"):
        environment = {"duration": str(timedelta(seconds=round(seconds))), **environment}
    if "loss" in overrides and (ran := summary.get("loss")) not in (None, config.get("loss.impl", ran)):
        overrides["loss"] += f"{_RAN}{ran})"
    measured: dict[str, Any] = summary["metrics"]
    metrics = {name: float(v) if isinstance(v, int | float) else math.nan for name, v in measured.items()}
    more = summary.get("tokens", 0), summary.get("samples", {})
    return Run(name, folder, summary["status"], overrides, metrics, error, config, environment, *more)


def _last_word(folder: Path, runs: bool | None) -> str:
    """Return the sentence about a run that wrote neither how it ended nor why."""
    metrics, newest = folder / "metrics.csv", newest_in(folder / "checkpoints")
    steps = [int(row["step"]) for row in _rows(folder)]
    when = f", written {datetime.fromtimestamp(metrics.stat().st_mtime):%Y-%m-%d %H:%M:%S}" if steps else ""
    known = f"the last step in metrics.csv is {max(steps)}{when}" if steps else "it logged no step"
    if runs:
        return f"still running; {known}"
    go_on = f"; resume it with {resuming(newest)}" if newest else ""
    or_runs = ", or it runs on another machine" if runs is None else ""
    killed = f"it left no word: it was killed (by the system for want of memory, for instance){or_runs}"
    return f"{killed}; {known}{go_on}"


def _rows(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of metrics.csv that have a step, up to one that cannot be read."""
    with suppress(csv.Error):
        for row in csv.DictReader(io.StringIO(_read(folder / "metrics.csv", str) or "")):
            if (row.get("step") or "").isdecimal():
                yield row


def _summary(text: str) -> dict[str, Any]:
    content: Any = {"samples": {}, "tokens": 0, **json.loads(text)}
    kinds = {"status": str, "overrides": list, "metrics": dict, "samples": dict, "tokens": int}
    if not all(isinstance(content.get(name), kind) for name, kind in kinds.items()):
        raise TypeError
    return content


def _from_yaml(text: str) -> Any:
    return yaml.load(plain_yaml(text), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # libyaml reads ten times as fast


def _read(path: Path, parse: Callable[[str], Any]) -> Any:
    """Return a file's content; None if there is no such file, or only a part of it, or it is damaged."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        return None


def _flat(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node


def read_series(run: Run) -> dict[str, list[tuple[int, float]]]:
    """Return all finite values that Lightning's CSVLogger wrote, as (step, value) by name."""
    series: dict[str, list[tuple[int, float]]] = {}
    for row in _rows(run.folder):
        for name, cell in row.items():  # each row fills only the columns logged together
            with suppress(ValueError, TypeError):  # A killed run, or another program, has damaged it.
                if cell and name not in ("step", "epoch") and math.isfinite(value := float(cell)):
                    series.setdefault(name, []).append((int(row["step"]), value))
    return series


def axes_of(series: Mapping[str, list[tuple[int, float]]]) -> dict[str, list[tuple[int, float]]]:
    """Return what a curve can be drawn over beside the optimizer step, as (step, value) by the axis' name."""
    rate = next((name for name in series if name.startswith("lr-")), "")
    names = {**AXES, "learning rate": rate}
    return {axis: series[name] for axis, name in names.items() if name in series}


def validations(series: Mapping[str, list[tuple[int, float]]]) -> tuple[list[str], list[list[str]]]:
    """Return headings, and a row of what was measured after each step that was validated."""
    names = [name for name in series if name.startswith(("val/", "test/"))]
    found = {name: dict(series[name]) for name in names}
    steps = sorted({step for points in found.values() for step in points})
    rows = [[f"{found[name][step]:.5g}" if step in found[name] else ABSENT for name in names] for step in steps]
    return ["step", *names], [[f"{step:,}", *row] for step, row in zip(steps, rows, strict=True)]


def distinguishing_overrides(runs: list[Run]) -> list[str]:
    """Return the overrides whose values differ between the runs, in the order given; all of them if none does."""
    differing, same = differing_keys([run.overrides for run in runs])
    return differing or same


def differing_keys(mappings: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the keys whose values differ between mappings, and the other keys. Empty mappings do not count."""
    known = [values for values in mappings if values]
    keys = list(dict.fromkeys(key for values in known for key in values))
    differing = [key for key in keys if len({json.dumps(values.get(key, ABSENT)) for values in known}) > 1]
    return differing, [key for key in keys if key not in differing]


def drawn(runs: list[Run]) -> tuple[list[Run], str]:
    """Return the runs to draw, and a sentence about the others, which is empty if there are none."""
    if len(runs) <= MOST_DRAWN:
        return runs, ""
    losses = [run.metrics.get("val/loss", math.nan) for run in runs]
    best = sorted(range(len(runs)), key=lambda i: math.inf if math.isnan(losses[i]) else losses[i])[:MOST_DRAWN]
    others = f"the {MOST_DRAWN} with the lowest validation loss are drawn, {len(runs) - MOST_DRAWN} are not"
    return [runs[i] for i in sorted(best)], others


@dataclass(frozen=True)
class Look:
    """Says how the line of a run is drawn; width and dashes in points."""

    color: str
    width: float
    dash: tuple[int, ...]


def looks_of(runs: list[Run]) -> list[Look]:
    """Choose each run's colour and width by its first distinguishing override, dashes by the others. Lines get thinner
    from colour to colour, because exact losses draw the same curve."""
    keys = distinguishing_overrides(runs)
    values = [run.values(keys) for run in runs]
    firsts, rests = list(dict.fromkeys(v[:1] for v in values)), list(dict.fromkeys(v[1:] for v in values))
    colors, widths, last = PALETTE, [THINNEST] * len(firsts), len(firsts) - 1
    if len(firsts) > len(PALETTE):
        channels = [colorsys.hls_to_rgb(index / len(firsts), 0.5, 0.65) for index in range(len(firsts))]
        colors = ["#" + "".join(f"{round(255 * channel):02x}" for channel in color) for color in channels]
    elif last:
        widths = [THINNEST + min(3.6, 1.8 * last) * (1 - index / last) for index in range(len(firsts))]
    of_first = dict(zip(firsts, zip(colors, widths, strict=False), strict=True))
    return [Look(*of_first[v[:1]], DASHES[rests.index(v[1:]) % len(DASHES)]) for v in values]


def _columns_of(runs: list[Run]) -> list[tuple[str, str, str]]:
    known = {"val/loss", _SPEED, _PEAK}.union(*(run.metrics for run in runs))
    return [column for column in COLUMNS if column[0] in known]


def csv_table(runs: list[Run]) -> str:
    """Return a row per run, with full precision, logged names, and empty cells for missing values."""
    keys, names = distinguishing_overrides(runs), [name for name, _, _ in _columns_of(runs)]
    text = io.StringIO()
    writer = csv.DictWriter(text, ["run", *keys, *names, "status"], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({**run.metrics, **run.overrides, "run": run.name, "status": run.status} for run in runs)
    return text.getvalue()


def text_table(runs: list[Run], keys: list[str]) -> tuple[list[str], list[list[str]]]:
    """Return headings, and a row of rounded cells per run. The columns between ``keys`` and the last have numbers."""
    columns = _columns_of(runs)
    rows = [
        [
            *(run.name, *run.values(keys)),
            *(f"{run.metrics[name]:{spec}}" if name in run.metrics else ABSENT for name, _, spec in columns),
            run.status,
        ]
        for run in runs
    ]
    return ["run", *keys, *(heading for _, heading, _ in columns), "status"], rows


def seed_table(runs: list[Run]) -> tuple[list[str], list[list[str]]] | None:
    """Return headings and a row for each configuration of several seeds: mean ± standard deviation of what its
    completed runs measured, and their number. None if no configuration has several."""
    keys = [key for key in distinguishing_overrides(runs) if key != "seed"]
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(value.partition(_RAN)[0] for value in run.values(keys)), []).append(run)
    if len({run.overrides.get("seed") for run in runs}) < 2 or len(groups) == len(runs):
        return None
    columns, rows = _columns_of(runs), []
    for group in groups.values():
        values = max((run.values(keys) for run in group), key=lambda values: sum(map(len, values)))
        completed = [run for run in group if run.status == "completed"]
        cells = []
        for name, _, spec in columns:
            found = [run.metrics[name] for run in completed if name in run.metrics]
            cells.append(_mean_and_deviation(found, spec) if found else ABSENT)
        rows.append([*values, *cells, f"{len(completed)} of {len(group)}"])
    return [*keys, *(heading for _, heading, _ in columns), "completed"], rows


_MARKDOWN = {"&": "&amp;", "<": "&lt;", ">": "&gt;"} | {sign: f"\\{sign}" for sign in "\\`*|~"}


def markdown_text(text: str) -> str:
    """Return Markdown that shows a text as it is: no HTML, no link, no picture and no other column."""
    return " ".join(text.split()).translate(str.maketrans(_MARKDOWN)).replace("](", r"]\(")


def markdown_table(runs: list[Run]) -> str:
    """Return a row per run, rounded and aligned as plain text; of several seeds also one for each configuration."""
    keys = distinguishing_overrides(runs)
    seeds = seed_table(runs)
    of_seeds = f"{_markdown(*seeds, 0, len(keys) - 1)}\n" if seeds else ""
    return of_seeds + _markdown(*text_table(runs, keys), 1, len(keys) + 1)


def failures(runs: list[Run]) -> str:
    """Return a list, as Markdown, of the runs that left a sentence about why they are not completed."""
    said = [(f"run {run.name}, {run.status}", run.error) for run in runs if run.error]
    lines = [f"- {markdown_text(run)}: {markdown_text(error)}\n" for run, error in said]
    return "\n" + "".join(lines) if lines else ""


def _markdown(head: list[str], body: list[list[str]], first: int, last: int) -> str:
    """Align the columns from ``first`` to before ``last``, and the last of all, to the left, others to the right."""
    rows = [[markdown_text(cell) for cell in row] for row in (head, *body)]
    right = [index != len(head) - 1 and not first <= index < last for index in range(len(head))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * (width - 1) + (":" if to else "-") for width, to in zip(widths, right, strict=True)])
    forms = [f"{{:{'>' if to else '<'}{width}}}" for width, to in zip(widths, right, strict=True)]
    return "".join(f"| {' | '.join(forms)} |\n".format(*row) for row in rows)


def _mean_and_deviation(values: list[float], spec: str) -> str:
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return f"{mean:{spec}}"
    # statistics.stdev raises an AttributeError where one of the values is infinite, as a perplexity can be.
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return f"{mean:{spec}} ± {deviation:{spec}}"
