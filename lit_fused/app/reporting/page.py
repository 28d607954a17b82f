"""Write the files of a report, each in one step, because parallel jobs write the same files while others read them.

The page shows the runs of a sweep, or one run. Its tables and bars are plain HTML; its own script (``page.html``) draws
the curves from the data in it. A policy in the page forbids it to load anything.
"""

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

from lit_fused.app.reporting import sweep
from lit_fused.app.reporting.plots import png, sweep_figure
from lit_fused.app.reporting.sweep import Run, csv_table, failures, markdown_table, markdown_text, read_run, read_runs
from lit_fused.app.run_folder import write_whole
from lit_fused.errors import Stopped, UserError

_ERROR_LENGTH = 1000  # characters
# The most points of a curve; a longer curve keeps the two extremes of each part. Many curves share ALL_POINTS.
POINTS, FEWEST_POINTS, ALL_POINTS = 1000, 100, 200_000
LARGEST_CSV = 2**20  # bytes
FIRST = ("train/loss", "val/loss", "train/gradient_norm", "throughput/tokens_per_sec", "throughput/mfu")
FIRST += ("memory/peak_allocated_gib",)


def write_report(sweep_folder: Path, *, draw: bool = True) -> str:
    """Write ``report.md``, ``report.csv``, ``report.html`` and ``report.png``; return the table and the files' paths. A
    sentence takes the place of the picture without matplotlib; ``draw=False`` leaves it out, as it takes longest. A
    sweep without a run in its folder has no report."""
    runs = read_runs(sweep_folder)
    if not runs:
        return ""
    table = markdown_table(runs) + failures(runs)
    page = html_page(runs, f"Sweep {sweep_folder.name}")
    files = {"report.md": b"", "report.csv": csv_table(runs).encode(), "report.html": page.encode()}
    picture = "![Memory against speed, peak memory and training loss of each run](report.png)" if draw else ""
    notes: list[str] = []
    try:
        if draw:
            files["report.png"] = png(sweep_figure(runs))
    except UserError as error:
        picture = str(error)
        notes = [picture]
    files["report.md"] = f"# Sweep {markdown_text(sweep_folder.name)}\n\n{table}\n{picture}\n".encode()
    for name, content in files.items():
        write_whole(sweep_folder / name, content)
    return "\n".join([table, *(str(sweep_folder / name) for name in files), *notes])


def write_run_page(folder: Path) -> None:
    write_whole(folder / "report.html", html_page([read_run(folder)], f"Run {folder.name}").encode())


def record_failure(path: Path, error: BaseException) -> bool:
    """Write why the run ended, in a sentence; return False if another rank has failed before and has written it."""
    # Lightning turns Ctrl-C into SystemExit.
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
        sentence = "interrupted"
    elif isinstance(error, Stopped):
        sentence = error.sentence
    elif isinstance(error, UserError):
        sentence = str(error)
    else:
        text = " ".join(str(error).split())
        sentence = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if len(sentence) > _ERROR_LENGTH:
        sentence = sentence[:_ERROR_LENGTH] + " ..."
    try:
        with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(sentence + "\n")
    except FileExistsError:
        return not path.is_file()
    except OSError:  # the disk may be what has failed
        with contextlib.suppress(OSError):
            path.unlink()
    return True


def html_page(runs: list[Run], title: str) -> str:
    """Return the whole page. There is at least one run, and runs may have failed."""
    from jinja2 import Environment, PackageLoader  # here, because a run that is refused at once does not need it

    many, keys = len(runs) > 1, sweep.distinguishing_overrides(runs)
    shown, others = sweep.drawn(runs)
    all_series = [sweep.read_series(run) for run in shown]
    limit = max(FEWEST_POINTS, min(POINTS, ALL_POINTS // max(sum(map(len, all_series)), 1)))

    def label(run: Run) -> str:
        return " · ".join(run.values(keys)) if many and keys else run.folder.name

    data = [
        {
            "name": run.name,
            "label": label(run),
            "color": look.color.replace("#000000", "var(--ink)"),
            "width": round(look.width, 2),
            "dash": look.dash,
            "place": run.place,
            "axes": _rounded(sweep.axes_of(series), limit),
            "series": _rounded({name: series[name] for name in series if name not in sweep.AXES.values()}, limit),
        }
        for run, look, series in zip(shown, sweep.looks_of(shown), all_series, strict=True)
    ]
    failed = sum(run.status == "failed" for run in runs)
    if many:
        subtitle = f"{len(runs)} runs" + (f", {failed} failed" if failed else "")
        subtitle += f", over {', '.join(keys)}" if keys else ""
    else:
        subtitle = " ".join(f"{key}={value}" for key, value in runs[0].overrides.items()) or "the default configuration"
    head, rows = sweep.text_table(runs, keys if many else [])  # one run's overrides are in the subtitle
    look = {one["name"]: one for one in data}
    environment = Environment(loader=PackageLoader("lit_fused.app.reporting", "."), autoescape=True)
    environment.filters["shown"] = lambda value: value if isinstance(value, str) else json.dumps(value)
    return environment.get_template("page.html").render(
        title=title,
        subtitle=subtitle,
        runs=[(run, look.get(run.name, {"label": label(run)}), row) for run, row in zip(runs, rows, strict=True)],
        drawn=list(zip(shown, data, strict=True)),
        others=others,
        failed=failed,
        head=head,
        texts=len(keys) if many else 0,
        highest=max((peak for run in shown for peak in run.peaks.values()), default=None),
        config=sweep.differing_keys(run.config for run in shown),
        environment=sweep.differing_keys(run.environment for run in shown),
        absent=sweep.ABSENT,
        seeds=sweep.seed_table(runs) if many else None,
        csv=csv_table(runs),
        data=data,
        names=sorted({name for series in all_series for name in series if name not in sweep.AXES.values()}, key=_rank),
        axes=list(dict.fromkeys(axis for one in data for axis in one["axes"])),
        places=many and any(run.place for run in shown),
        validations=None if many else sweep.validations(all_series[0]),
        measured=None if many else _csv_of(runs[0]),
    )


def _csv_of(run: Run) -> str:
    """Return all that a run has logged; "" if it is more than a page should hold."""
    path = run.folder / "metrics.csv"
    return (
        path.read_text(encoding="utf-8", errors="replace")
        if path.is_file() and path.stat().st_size <= LARGEST_CSV
        else ""
    )


def _rounded(series: Mapping[str, list[tuple[int, float]]], limit: int) -> dict[str, list[tuple[int, float]]]:
    return {
        name: [(step, float(f"{value:.7g}")) for step, value in thinned(points, limit)]
        for name, points in series.items()
    }


def thinned(points: list[tuple[int, float]], limit: int = POINTS) -> list[tuple[int, float]]:
    """Return at most ``limit`` of the points in order, with the first, the last, and every visible extreme."""
    if len(points) <= limit:
        return points
    size = math.ceil(len(points) / ((limit - 2) // 2))
    kept = {points[0], points[-1]}
    for start in range(0, len(points), size):
        part = points[start : start + size]
        kept |= {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
    return sorted(kept)


def _rank(name: str) -> tuple[int, str]:
    last = name.startswith(("memory/", "data/"))  # They have one point, or are parts of another figure.
    return (FIRST.index(name) if name in FIRST else len(FIRST) + last, name)
