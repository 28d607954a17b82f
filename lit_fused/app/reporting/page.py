"""Write the report of a sweep or of one run: tables, one picture, and a page without scripts that loads nothing."""

import base64
import io
import itertools
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from lit_fused.app.reporting.runs import ABSENT, Run, differing, read_run, read_runs
from lit_fused.app.run_folder import write_whole
from lit_fused.ops.user_error import printable

SPEED, PEAK = "throughput/tokens_per_sec", "memory/peak_allocated_gib"
COLUMNS = {  # of the tables, where a run has measured them: heading and number format
    "val/loss": ("val loss", ".4f"),
    "val/perplexity": ("val perplexity", ",.2f"),
    "val/reward_accuracy": ("val reward accuracy", ".3f"),
    "val/ndcg_at_10": ("val NDCG@10", ".4f"),
    SPEED: ("tokens/s", ",.0f"),
    "throughput/mfu": ("MFU", ".1%"),
    PEAK: ("peak memory (GiB)", ".3f"),
}
# Okabe and Ito's palette without its yellow (too pale on white); safe for colour-blind readers.
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F"]
_PLACES, _PHASES = "memory against speed", "peak memory per phase (GiB)"  # panels beside the curves
_FIRST = [_PLACES, _PHASES, "train/loss", "val/loss", "train/gradient_norm", SPEED, "lr-AdamW", "val/accuracy"]
_NOT_DRAWN = re.compile("memory/|data/|throughput/(tokens|seconds)$")
_MOST_PANELS, _MOST_RUNS = 9, 40


class Line(NamedTuple):
    """How the runs of one configuration are drawn, whatever their seeds."""

    runs: list[Run]
    label: str
    color: str
    width: float


def write_report(sweep: Path) -> str:
    """Write ``report.md``, ``report.png`` and ``report.html``; return the tables, "" without a run."""
    runs, title = read_runs(sweep), f"Sweep {'/'.join(sweep.absolute().parts[-2:])}"
    if not runs:
        return ""
    tables, image = _write_page(sweep / "report.html", runs, title)
    text = "\n".join(map(_markdown, tables))
    text += "".join(f"\n- run {run.name}, {run.status}: {_plain(run.error)}" for run in runs if run.error)
    write_whole(sweep / "report.png", image)
    write_whole(sweep / "report.md", f"# {title}\n\n{text}\n\n![Memory, speed and curves](report.png)\n".encode())
    return text


def write_run_page(folder: Path) -> None:
    _write_page(folder / "report.html", [read_run(folder)], f"Run {'/'.join(folder.absolute().parts[-2:])}")


def _write_page(path: Path, runs: list[Run], title: str) -> tuple[list[list[list[str]]], bytes]:
    """Write the page; return its tables, as rows of cells, and its picture."""
    from jinja2 import Environment, PackageLoader  # here, because a run that is refused at once does not need it

    keys = differing(run.overrides for run in runs) or list(runs[0].overrides)
    compared, tables = [key for key in keys if key != "seed"], [_table([[run] for run in runs], keys, alone=True)]
    groups = _by_configuration(runs, compared)
    if "seed" in keys and len(groups) < len(runs):
        tables.insert(0, _table(groups, compared, alone=False))
    losses = {run.name: run.metrics.get("val/loss", math.nan) for run in runs}
    best = sorted(losses, key=lambda name: (math.isnan(losses[name]), losses[name]))[:_MOST_RUNS]
    drawn = [run for run in runs if run.name in best]
    panels, image = _picture(drawn, compared)
    page = Environment(loader=PackageLoader("lit_fused.app.reporting", "."), autoescape=True).get_template("page.html")
    shown = {"keys": keys, "tables": tables, "panels": panels, "picture": base64.b64encode(image).decode()}
    write_whole(path, page.render(title=title, runs=runs, drawn=drawn, **shown).encode())
    return tables, image


def _by_configuration(runs: list[Run], keys: list[str]) -> list[list[Run]]:
    """Return the runs in groups that differ in the seed alone."""
    groups: dict[tuple[str | None, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(run.overrides.get(key) for key in keys), []).append(run)
    return list(groups.values())


def _table(groups: list[list[Run]], keys: list[str], *, alone: bool) -> list[list[str]]:
    """Return headings, and for each group of runs mean ± standard deviation of those that were completed; for a run
    ``alone`` its name and status as well."""
    columns = [name for name in COLUMNS if any(name in run.metrics for group in groups for run in group)]
    headings = [*keys, *(COLUMNS[name][0] for name in columns)]
    rows = [["run", *headings, "status"] if alone else [*headings, "completed"]]
    for group in groups:
        ended = [run for run in group if not run.error]
        cells = (ended or group)[0].values(keys)  # A run that failed does not know its stand-in.
        for name in columns:
            values, spec = [run.metrics[name] for run in ended if name in run.metrics], COLUMNS[name][1]
            mean = sum(values) / max(len(values), 1)
            variance = sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
            spread = f" ± {math.sqrt(variance):{spec}}" * (len(values) > 1)
            cells.append(f"{mean:{spec}}{spread}" if values else ABSENT)
        rows.append([group[0].name, *cells, group[0].status] if alone else [*cells, f"{len(ended)} of {len(group)}"])
    return rows


def _markdown(rows: list[list[str]]) -> str:
    """Return a table whose columns are aligned as plain text too."""
    columns = [[_plain(cell) for cell in cells] for cells in zip(*rows, strict=True)]
    widths = [max(map(len, cells)) for cells in columns]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in zip(*columns, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _plain(text: str) -> str:
    """Return Markdown that shows a text as it is, in one cell."""
    return printable(" ".join(text.split())).replace("|", r"\|").replace("<", "&lt;")


def _picture(runs: list[Run], keys: list[str]) -> tuple[list[str], bytes]:
    """Return the titles of the panels, and the picture as a PNG."""
    from matplotlib import style
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    known = {name for run in runs for name in run.curves if not _NOT_DRAWN.match(name)}
    known |= {_PLACES for run in runs if {SPEED, PEAK} <= run.metrics.keys() and len(runs) > 1}
    known |= {_PHASES for run in runs if "memory/forward_gib" in run.metrics}
    panels = sorted(known, key=lambda name: (_FIRST.index(name) if name in _FIRST else 99, name))[:_MOST_PANELS]
    groups, rows, image = _by_configuration(runs, keys), math.ceil(len(panels) / 3), io.BytesIO()
    labels = [" · ".join(max((run.values(keys) for run in group), key=str)) for group in groups]
    widths = [1.2 + min(1.8, 3.6 / len(groups)) * index for index in range(len(groups))]
    lines = [*map(Line, groups, labels, itertools.cycle(PALETTE), reversed(widths))]  # Exact losses draw one curve.
    with style.context("seaborn-v0_8-whitegrid"):
        figure = Figure(figsize=(15, 1 + 3.4 * rows), dpi=110, layout="constrained")
        for place, title in enumerate(panels):
            axes = figure.add_subplot(rows, 3, place + 1, title=title)
            {_PLACES: _draw_places, _PHASES: _draw_phases}.get(title, _draw_curves)(axes, lines, title)
        if len(lines) > 1:
            handles = [Line2D([], [], color=line.color, lw=line.width, label=line.label) for line in lines]
            figure.legend(handles=handles, loc="outside upper center", ncols=6)
        figure.savefig(image, format="png")
    return panels, image.getvalue()


def _draw_places(axes: Any, lines: list[Line], title: str) -> None:
    for line in lines:
        places = [(run.metrics.get(SPEED, math.nan), run.metrics.get(PEAK, math.nan)) for run in line.runs]
        axes.scatter(*zip(*places, strict=True), s=60, color=line.color)
    axes.set(xlabel="tokens/s (more is better)", ylabel="peak memory in GiB (less is better)")


def _draw_phases(axes: Any, lines: list[Line], title: str) -> None:
    for row, line in enumerate(lines):
        for place, phase in enumerate(("forward", "backward", "optimizer")):
            peak = max(run.metrics.get(f"memory/{phase}_gib", 0.0) for run in line.runs)
            bar = axes.barh(row + 0.27 * place, peak, 0.25, color=line.color, alpha=1 - 0.3 * place)
            axes.bar_label(bar, [f"{phase} {peak:.3f}" if peak else ""], padding=3, fontsize=7)
    axes.set_yticks([row + 0.27 for row in range(len(lines))], [line.label for line in lines])
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.3)
    axes.invert_yaxis()


def _draw_curves(axes: Any, lines: list[Line], title: str) -> None:
    for line in lines:
        for points in (run.curves[title] for run in line.runs if title in run.curves):
            marker = "o" if len(points) < 9 else ""
            axes.plot(*zip(*points, strict=True), color=line.color, lw=line.width, marker=marker, markersize=4)
    axes.set_xlabel("optimizer step")
