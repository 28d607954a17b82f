"""Write the report of a sweep or of one run: tables, one picture, and a page without scripts that loads nothing."""

import io
import json
import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lit_fused.app.reporting.runs import ABSENT, Run, by_configuration, differing, read_run, read_runs
from lit_fused.app.run_folder import write_whole

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
_GREY = "#808890"  # is read on white and on black
_STYLE: Any = {"svg.fonttype": "none", "axes.spines.right": False, "axes.spines.top": False, "axes.axisbelow": True}
_STYLE |= {"axes.grid": True, "grid.alpha": 0.25, "font.size": 9, "axes.titlesize": 10, "legend.frameon": False}
_STYLE |= dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _GREY)
_FIRST = ["train/loss", "val/loss", "train/gradient_norm", SPEED, "lr-AdamW", "val/accuracy", "throughput/mfu"]
_NOT_DRAWN = re.compile("memory/|data/|throughput/(tokens|seconds)$")  # Of memory there is a panel of its own.
_MOST_CURVES, _MOST_RUNS = 7, 40
_PHASES = [f"memory/{phase}_gib" for phase in ("forward", "backward", "optimizer")]


class Line(NamedTuple):
    """How the runs of one configuration are drawn, whatever their seeds."""

    runs: list[Run]
    label: str
    color: str
    width: float


def write_report(sweep: Path) -> str:
    """Write ``report.md``, ``report.png`` and ``report.html``; return the tables, "" without a run."""
    runs = read_runs(sweep)
    if not runs:
        return ""
    keys, title = differing(run.overrides for run in runs) or list(runs[0].overrides), _title("Sweep", sweep)
    text = "\n".join(_markdown(rows) for rows in (_table_over_seeds(runs, keys), _table(runs, keys)) if rows)
    text += "".join(f"\n- run {run.name}, {run.status}: {_plain(run.error)}" for run in runs if run.error)
    write_whole(sweep / "report.html", _page(runs, keys, title).encode())
    write_whole(sweep / "report.png", _picture(_drawn(runs), keys, "png"))
    write_whole(sweep / "report.md", f"# {title}\n\n{text}\n\n![Memory, speed and curves](report.png)\n".encode())
    return text


def write_run_page(folder: Path) -> None:
    write_whole(folder / "report.html", _page([read_run(folder)], [], _title("Run", folder)).encode())


def _table(runs: list[Run], keys: list[str]) -> list[list[str]]:
    """Return rows of cells: headings, and each run."""
    columns = _measured(runs)
    rows = [[run.name, *run.values(keys), *_cells([run], columns), run.status] for run in runs]
    return [["run", *keys, *(COLUMNS[name][0] for name in columns), "status"], *rows]


def _table_over_seeds(runs: list[Run], keys: list[str]) -> list[list[str]]:
    """Return headings, and for each configuration mean ± standard deviation of its completed runs; [] if none has two
    seeds."""
    groups, columns = by_configuration(runs), _measured(runs)
    if "seed" not in keys or len(groups) == len(runs):
        return []
    keys = [key for key in keys if key != "seed"]
    rows = [[*keys, *(COLUMNS[name][0] for name in columns), "completed"]]
    for group in groups:
        ended = [run for run in group if run.status == "completed"]
        of = (ended or group)[0].values(keys)  # A run that failed does not know its stand-in.
        rows.append([*of, *_cells(ended, columns), f"{len(ended)} of {len(group)}"])
    return rows


def _measured(runs: list[Run]) -> list[str]:
    return [name for name in COLUMNS if any(name in run.metrics for run in runs)]


def _cells(runs: list[Run], columns: list[str]) -> Iterator[str]:
    for name in columns:
        values, spec = [run.metrics[name] for run in runs if name in run.metrics], COLUMNS[name][1]
        mean = sum(values) / len(values) if values else 0.0
        squares = sum((value - mean) ** 2 for value in values)
        spread = f" ± {math.sqrt(squares / (len(values) - 1)):{spec}}" if len(values) > 1 else ""
        yield f"{mean:{spec}}{spread}" if values else ABSENT


def _markdown(rows: list[list[str]]) -> str:
    """Return a table whose columns are aligned as plain text too, numbers to the right."""
    columns = []
    for cells in zip(*rows, strict=True):
        texts = [_plain(cell) for cell in cells]
        right, width = all(cell[:1] in f"-0123456789n{ABSENT}" for cell in cells[1:]), max(map(len, texts))
        head, *others = (text.rjust(width) if right else text.ljust(width) for text in texts)
        columns.append([head, "-" * (width - 1) + (":" if right else "-"), *others])
    return "".join(f"| {' | '.join(row)} |\n" for row in zip(*columns, strict=True))


def _plain(text: str) -> str:
    """Return Markdown that shows a text as it is, in one cell."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")


def _title(kind: str, folder: Path) -> str:
    """Return for example "Sweep of 2026-11-28 10-20-30", for Hydra's folder of that day and time."""
    day = folder.absolute().parent.name
    return f"{kind} of {day} {folder.name}" if day[:2] == "20" else f"{kind} {folder.name}"


def _drawn(runs: list[Run]) -> list[Run]:
    """Return the runs of a picture: all, or those with the lowest validation loss."""
    losses = {run.name: run.metrics.get("val/loss", math.nan) for run in runs}
    best = sorted(losses, key=lambda name: math.inf if math.isnan(losses[name]) else losses[name])[:_MOST_RUNS]
    return [run for run in runs if run.name in best]


def _page(runs: list[Run], keys: list[str], title: str) -> str:
    from jinja2 import Environment, PackageLoader  # here, because a run that is refused at once does not need it

    page = Environment(loader=PackageLoader("lit_fused.app.reporting", "."), autoescape=True).get_template("page.html")
    drawn = _drawn(runs)
    return page.render(
        title=title,
        runs=runs,
        drawn=drawn,
        keys=keys,
        colors={run.name: line.color for line in _lines(drawn, keys) for run in line.runs},
        seeds=_table_over_seeds(runs, keys),
        table=_table(runs, keys),
        picture=_picture(drawn, keys, "svg").decode().partition("<!DOCTYPE")[2].partition(">")[2],
        parts={part: differing(getattr(run, part) for run in drawn) for part in ("configuration", "environment")},
        shown=lambda value: value if isinstance(value, str) else json.dumps(value),
        absent=ABSENT,
    )


def _lines(runs: list[Run], keys: list[str]) -> list[Line]:
    """Return what is drawn. Lines get thinner, because exact losses draw the same curve."""
    groups, keys = by_configuration(runs), [key for key in keys if key != "seed"]
    thick = min(3.6, 1.8 * (len(groups) - 1)) / max(len(groups) - 1, 1)
    return [
        Line(
            group,
            " · ".join(max((run.values(keys) for run in group), key=str)) or "all runs",
            PALETTE[index % len(PALETTE)],
            1.2 + thick * (len(groups) - 1 - index),
        )
        for index, group in enumerate(groups)
    ]


def _picture(runs: list[Run], keys: list[str], form: str) -> bytes:
    """Return an "svg", which a page of any ground shows, or a "png"."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    known = {name for run in runs for name in run.curves if not _NOT_DRAWN.match(name)}
    names = sorted(known, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))[:_MOST_CURVES]
    panels: list[tuple[str, Any]] = [(name, partial(_draw_curves, name=name)) for name in names]
    if any(set(_PHASES) & run.metrics.keys() for run in runs):
        panels.insert(0, ("peak memory per phase (GiB)", _draw_phases))
    if len(runs) > 1 and any({SPEED, PEAK} <= run.metrics.keys() for run in runs):
        panels.insert(0, ("memory against speed", _draw_places))
    lines, rows, image = _lines(runs, keys), -(-len(panels) // 3), io.BytesIO()
    with rc_context(_STYLE):
        figure = Figure(figsize=(15, 1 + 3.4 * rows), dpi=110, layout="constrained")
        for index, (title, draw) in enumerate(panels):
            draw(figure.add_subplot(rows, 3, index + 1, title=title), lines)
        if len(lines) > 1:
            handles = [Line2D([], [], color=line.color, lw=line.width, label=line.label) for line in lines]
            figure.legend(handles=handles, loc="outside upper center", ncols=6)
        figure.savefig(image, format=form, transparent=form == "svg")
    return image.getvalue()


def _draw_places(axes: Any, lines: list[Line]) -> None:
    for line in lines:
        places = [(run.metrics[SPEED], run.metrics[PEAK]) for run in line.runs if {SPEED, PEAK} <= run.metrics.keys()]
        axes.scatter(*zip(*places, strict=True) if places else ([], []), s=60, color=line.color, alpha=0.8)
    axes.margins(0.2)
    axes.set(xlabel="tokens/s (more is better)", ylabel="peak memory in GiB (less is better)")


def _draw_phases(axes: Any, lines: list[Line]) -> None:
    for place, phase in enumerate(_PHASES):
        peaks = [max(run.metrics.get(phase, 0.0) for run in line.runs) for line in lines]
        rows = [row + 0.27 * (place - 1) for row in range(len(lines))]
        bars = axes.barh(rows, peaks, 0.25, color=[line.color for line in lines], alpha=1 - 0.3 * place)
        words = phase[len("memory/") : -len("_gib")]
        axes.bar_label(bars, [f"{words} {peak:.3f}" if peak else "" for peak in peaks], padding=3, fontsize=7)
    axes.set_yticks(range(len(lines)), [line.label for line in lines] if len(lines) > 1 else [""])
    axes.margins(x=0.3)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def _draw_curves(axes: Any, lines: list[Line], name: str) -> None:
    for line in lines:
        for points in (run.curves[name] for run in line.runs if name in run.curves):
            marker = "o" if len(points) < 9 else ""
            axes.plot(*zip(*points, strict=True), color=line.color, lw=line.width, marker=marker, markersize=4)
    axes.set_xlabel("optimizer step")
