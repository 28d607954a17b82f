"""Read a sweep's folder, and make tables and a picture of its runs.

A sweep has one numbered folder per run. A completed run wrote ``summary.json`` (its overrides and last metrics). A run
without it failed, and has a row too: a baseline that ran out of memory is a result. ``error.txt`` says why it failed.
Lightning's ``metrics.csv`` has the training curve, also of failed runs.

Runs are labelled by the overrides that differ between them. The first of these (for example the loss) decides the
colour in the picture, the others together (for example the seed) the line style. Exact losses draw the same curve, so
lines get thinner from colour to colour, and each stays visible inside the one before.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lit_fused.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ABSENT = "–"  # noqa: RUF001 (an en dash: the empty cell)

# (name in summary.json and the CSV, heading in Markdown, number format in Markdown)
COLUMNS = [
    ("val/loss", "val loss", ".4f"),
    ("val/perplexity", "val perplexity", ",.2f"),
    ("throughput/tokens_per_sec", "tokens/s", ",.0f"),
    ("throughput/mfu", "MFU", ".1%"),
    ("memory/peak_allocated_gib", "peak memory (GiB)", ".3f"),
]

# Okabe and Ito's palette without its yellow (too pale for a line on white); safe for colour-blind readers.
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
DASHES = [(), (9, 4), (2, 2), (10, 3, 2, 3), (18, 4), (7, 2, 2, 2, 2, 2)]  # in points: on, off, on, ...
THINNEST = 1.6  # points
PHASES = ("forward", "backward", "optimizer")  # the names in memory/..._gib


@dataclass(frozen=True)
class Run:
    """One run of a sweep. ``metrics`` has the last value of each metric that it measured.

    ``error`` is the sentence of a run that failed, if it wrote one; ``config`` is the composed configuration, flat.
    """

    number: int
    folder: Path
    status: str
    overrides: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def read_runs(sweep_folder: Path) -> list[Run]:
    """Return the runs below ``sweep_folder`` by number; none if the sweep never started one."""
    folders = [path for path in sweep_folder.glob("*") if path.is_dir() and path.name.isdecimal()]
    return [read_run(folder, int(folder.name)) for folder in sorted(folders, key=lambda path: int(path.name))]


def read_run(folder: Path, number: int = 0) -> Run:
    """Read the files that a run wrote to its folder."""
    left = {"config": _read_config(folder), "environment": _read_json(folder / "environment.json") or {}}
    summary = _read_json(folder / "summary.json")
    if summary is None:  # the run failed
        overrides_file, error_file = folder / ".hydra" / "overrides.yaml", folder / "error.txt"
        overrides = yaml.safe_load(overrides_file.read_text(encoding="utf-8")) if overrides_file.exists() else []
        error = error_file.read_text(encoding="utf-8").strip() if error_file.exists() else None
        return Run(number, folder, "failed", _parse_overrides(overrides), error=error, **left)
    return Run(number, folder, summary["status"], _parse_overrides(summary["overrides"]), summary["metrics"], **left)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / ".hydra" / "config.yaml"
    return dict(_flat(yaml.safe_load(path.read_text(encoding="utf-8")) or {})) if path.exists() else {}


def _flat(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node


def _parse_overrides(overrides: Iterable[str]) -> dict[str, str]:
    pairs = (override.partition("=") for override in overrides)
    return {key.lstrip("+"): value for key, _, value in pairs}


def read_training_curve(run: Run) -> tuple[list[int], list[float]]:
    """Return steps and training losses that Lightning's CSVLogger wrote; both empty if it wrote none."""
    points = read_series(run).get("train/loss", [])
    return [step for step, _ in points], [loss for _, loss in points]


def read_series(run: Run) -> dict[str, list[tuple[int, float]]]:
    """Return all finite values that Lightning's CSVLogger wrote, as (step, value) by name."""
    path = run.folder / "metrics.csv"
    series: dict[str, list[tuple[int, float]]] = {}
    if not path.exists():
        return series
    with path.open(encoding="utf-8", newline="") as file:  # each row fills only the columns logged together
        for row in csv.DictReader(file):
            for name, cell in row.items():
                if cell and name not in ("step", "epoch") and math.isfinite(value := float(cell)):
                    series.setdefault(name, []).append((int(row["step"]), value))
    return series


def distinguishing_overrides(runs: list[Run]) -> list[str]:
    """Return the overrides whose values differ between the runs, in the order given; all of them if none does."""
    differing, same = differing_keys([run.overrides for run in runs])
    return differing or same


def differing_keys(mappings: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the keys whose values differ between mappings, and the other keys.

    Empty mappings do not count: a run that failed early may not have written its own.
    """
    known = [values for values in mappings if values]
    keys = list(dict.fromkeys(key for values in known for key in values))
    differing = [key for key in keys if len({json.dumps(values.get(key, ABSENT)) for values in known}) > 1]
    return differing, [key for key in keys if key not in differing]


def columns_of(runs: list[Run]) -> list[tuple[str, str, str]]:
    """Return the table's columns, without MFU if no run knows it."""
    return [column for column in COLUMNS if column[1] != "MFU" or any(column[0] in run.metrics for run in runs)]


def csv_table(runs: list[Run]) -> str:
    """Return a row per run, with full precision, logged names, and empty cells for missing values."""
    keys, columns = distinguishing_overrides(runs), columns_of(runs)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", *keys, *(name for name, _, _ in columns), "status"])
    for run in runs:
        overrides = [run.overrides.get(key, "") for key in keys]
        metrics = [run.metrics.get(name, "") for name, _, _ in columns]
        writer.writerow([run.number, *overrides, *metrics, run.status])
    return text.getvalue()


def markdown_table(runs: list[Run]) -> str:
    """Return a row per run, rounded and aligned as plain text."""
    keys, columns = distinguishing_overrides(runs), columns_of(runs)
    numeric = [True, *(False for _ in keys), *(True for _ in columns), False]
    rows = [["run", *keys, *(heading for _, heading, _ in columns), "status"]]
    for run in runs:
        overrides = [run.overrides.get(key, ABSENT).replace("|", r"\|") for key in keys]
        metrics = [f"{run.metrics[name]:{spec}}" if name in run.metrics else ABSENT for name, _, spec in columns]
        rows.append([str(run.number), *overrides, *metrics, run.status])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * (width - 1) + (":" if right else "-") for width, right in zip(widths, numeric, strict=True)])
    forms = [f"{{:{'>' if right else '<'}{width}}}" for width, right in zip(widths, numeric, strict=True)]
    return "".join(f"| {' | '.join(forms)} |\n".format(*row) for row in rows)


def new_figure(inches: tuple[float, float]) -> Figure:
    """Return an empty figure; UserError without matplotlib."""
    try:
        from matplotlib.figure import Figure  # without pyplot there is no window and no global state
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise UserError(
            "The picture of the sweep needs matplotlib, which is not installed. "
            "Install it with: pip install 'lit-fused[report]'"
        ) from error
    return Figure(figsize=inches, dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))


def sweep_figure(runs: list[Run]) -> Figure:
    """Draw the peak memory of each run on the left, the training losses on the right."""
    keys = distinguishing_overrides(runs)
    look = _Look(runs, keys)
    failed = sum(run.status == "failed" for run in runs)
    count = f"{len(runs)} run{'s' if len(runs) > 1 else ''}" + (f", {failed} failed" if failed else "")

    figure = new_figure((13, max(4.8, 1.6 + 0.34 * len(runs))))
    figure.suptitle(f"Sweep over {', '.join(keys)}: {count}" if keys else f"Sweep: {count}", fontsize=14)
    memory_axes, loss_axes = figure.subplots(1, 2, width_ratios=[1, 1.25])
    _draw_memory(memory_axes, runs, keys, look)
    _draw_losses(loss_axes, runs, keys, look)
    return figure


class _Look:
    """Chooses colour and width by the first distinguishing override, line style by the others."""

    def __init__(self, runs: list[Run], keys: list[str]) -> None:
        self.firsts = list(dict.fromkeys(_values(run, keys[:1]) for run in runs))
        self.rests = list(dict.fromkeys(_values(run, keys[1:]) for run in runs))

    def color(self, first: tuple[str, ...]) -> str:
        index, count = self.firsts.index(first), len(self.firsts)
        if count <= len(PALETTE):
            return PALETTE[index]
        from matplotlib import colormaps
        from matplotlib.colors import to_hex

        return to_hex(colormaps["viridis"](0.92 * index / (count - 1)))

    def width(self, first: tuple[str, ...]) -> float:
        index, count = self.firsts.index(first), len(self.firsts)
        if count == 1 or count > len(PALETTE):
            return THINNEST
        return THINNEST + min(4.4, 2.2 * (count - 1)) * (1 - index / (count - 1))

    def style(self, rest: tuple[str, ...], width: float) -> tuple[float, tuple[float, ...]]:
        dashes = DASHES[self.rests.index(rest) % len(DASHES)]
        return 0, tuple(length / width for length in dashes)  # matplotlib multiplies by the width: dashes coincide


def _values(run: Run, keys: list[str]) -> tuple[str, ...]:
    return tuple(run.overrides.get(key, ABSENT) for key in keys)


def _label(values: tuple[str, ...]) -> str:
    return " · ".join(value if len(value) <= 20 else f"{value[:9]}…{value[-10:]}" for value in values)


def _draw_memory(axes: Axes, runs: list[Run], keys: list[str], look: _Look) -> None:
    name, heading, spec = COLUMNS[-1]
    peaks = [run.metrics.get(name, 0.0) for run in runs]
    without = {True: "failed", False: "not measured"}
    texts = [f"{run.metrics[name]:{spec}}" if name in run.metrics else without[run.status == "failed"] for run in runs]
    colors = [look.color(_values(run, keys[:1])) for run in runs]
    bars = axes.barh(range(len(runs)), peaks, height=0.7, color=colors)
    axes.bar_label(bars, labels=texts, padding=4)
    axes.set_yticks(range(len(runs)), labels=[_label(_values(run, keys)) for run in runs])
    axes.set_ylim(max(len(runs), 4) - 0.5, -0.5)  # run 0 on top, as in the table
    axes.set_xlim(0, 1.3 * max(peaks) or 1)  # room for the numbers
    axes.set(title="Peak memory", xlabel=heading, ylabel=" · ".join(keys))
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_losses(axes: Axes, runs: list[Run], keys: list[str], look: _Look) -> None:
    from matplotlib.lines import Line2D

    for run in runs:
        first, rest = _values(run, keys[:1]), _values(run, keys[1:])
        color, width = look.color(first), look.width(first)
        # Thin lines are drawn above wide ones, because exact losses coincide.
        axes.plot(*read_training_curve(run), color=color, lw=width, ls=look.style(rest, width), zorder=3 - width / 10)
    axes.set(title="Training loss", xlabel="optimizer step", ylabel="training loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)

    # The legend has an entry per colour and per line style, each group below its overrides' names.
    groups = {
        " · ".join(keys[:1]): [
            Line2D([], [], color=look.color(first), lw=look.width(first), label=_label(first)) for first in look.firsts
        ],
        " · ".join(keys[1:]): [
            Line2D([], [], color="0.3", lw=THINNEST, ls=look.style(rest, THINNEST), label=_label(rest))
            for rest in look.rests
        ],
    }
    heads = {title: Line2D([], [], linestyle="none", label=title) for title in groups if title}
    handles = [handle for title, head in heads.items() for handle in (head, *groups[title])]
    legend = axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, handlelength=3.2)
    for handle, text in zip(handles, legend.get_texts(), strict=True):
        text.set_fontweight("bold" if handle.get_linestyle() == "None" else "normal")
