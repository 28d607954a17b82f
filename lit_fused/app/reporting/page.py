"""Show the runs of a sweep, or one run, in one HTML file that needs no network and no other file.

Tables and bars are plain HTML. The page's own script (``page.html``) draws the curves from the data in it; they can be
read with a pointer, on a logarithmic scale, run by run. A policy in the page forbids it to load anything.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

from lit_fused.app.reporting.sweep import (
    ABSENT,
    DASHES,
    PALETTE,
    PHASES,
    THINNEST,
    Run,
    columns_of,
    differing_keys,
    distinguishing_overrides,
    read_series,
)

# Points of a curve. A longer one keeps the extremes of each of half as many parts. Many curves share ALL_POINTS.
POINTS, FEWEST_POINTS, ALL_POINTS = 1000, 100, 200_000
FIRST = ("train/loss", "val/loss", "throughput/tokens_per_sec", "throughput/mfu", "memory/peak_allocated_gib")


def html_page(runs: list[Run], title: str) -> str:
    """Return the whole page. There is at least one run, and runs may have failed."""
    look = _looks(runs)
    series = {run.number: read_series(run) for run in runs}
    names = sorted({name for curves in series.values() for name in curves}, key=_rank)
    failed = [run for run in runs if run.status == "failed"]
    curves = sum(map(len, series.values()))
    limit = max(FEWEST_POINTS, min(POINTS, ALL_POINTS // max(curves, 1)))
    data = [
        {
            "number": run.number,
            "label": _label(run, runs),
            **look[run.number],
            "series": {
                name: [(step, float(f"{value:.7g}")) for step, value in thinned(points, limit)]
                for name, points in series[run.number].items()
            },
        }
        for run in runs
    ]
    if len(runs) > 1:
        keys = distinguishing_overrides(runs)
        subtitle = f"{len(runs)} runs" + (f", {len(failed)} failed" if failed else "")
        subtitle += f", over {', '.join(keys)}" if keys else ""
    else:
        subtitle = " ".join(f"{key}={value}" for key, value in runs[0].overrides.items()) or "the default configuration"
    parts = {
        "title": html.escape(title),
        "subtitle": html.escape(subtitle),
        "failures": _failures(failed, runs),
        "results": _results(runs, look),
        "memory": _memory(runs, look),
        "configuration": _configuration(runs),
        "environment": _environment(runs),
        "data": _as_json(data),
        "names": _as_json(names),
    }
    template = files("lit_fused.app.reporting").joinpath("page.html").read_text(encoding="utf-8")
    return re.sub(r"@([a-z]+)@", lambda match: parts[match[1]], template)


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


def _as_json(value: Any) -> str:
    return json.dumps(value).replace("<", "\\u003c")  # so that no text of a run ends the script


def _rank(name: str) -> tuple[int, str]:
    return (FIRST.index(name) if name in FIRST else len(FIRST) + name.startswith("memory/"), name)


def _looks(runs: list[Run]) -> dict[int, dict[str, Any]]:
    """Choose colour and width by the first distinguishing override, dashes by the others, as in the picture."""
    keys = distinguishing_overrides(runs)
    of = {run.number: tuple(run.overrides.get(key, ABSENT) for key in keys) for run in runs}
    firsts, rests = list(dict.fromkeys(v[:1] for v in of.values())), list(dict.fromkeys(v[1:] for v in of.values()))
    looks = {}
    for number, values in of.items():
        index, count = firsts.index(values[:1]), len(firsts)
        palette = [*PALETTE[:-1], "var(--ink)"]
        few = count <= len(palette)
        color = palette[index] if few else f"hsl({round(360 * index / count)} 65% 50%)"
        width = THINNEST + (min(3.0, 1.0 * (count - 1)) * (1 - index / (count - 1)) if few and count > 1 else 0)
        looks[number] = {
            "color": color,
            "width": round(width, 2),
            "dash": list(DASHES[rests.index(values[1:]) % len(DASHES)]),
        }
    return looks


def _label(run: Run, runs: list[Run]) -> str:
    values = [run.overrides.get(key, ABSENT) for key in distinguishing_overrides(runs)]
    return " · ".join(values) if len(runs) > 1 and values else run.folder.name


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ["".join(f"<th>{cell}</th>" for cell in head)]
    lines += ["".join(cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in row) for row in rows]
    return "<table>\n" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "\n</table>"


def _failures(failed: list[Run], runs: list[Run]) -> str:
    if not failed:
        return ""
    rows = [
        (html.escape(_label(run, runs)), f'<td class="long failed">{html.escape(run.error or _NO_WORD)}</td>')
        for run in failed
    ]
    return '<h2>Failed</h2>\n<div class="wide">' + _table(["run", "error"], rows) + "</div>"


_NO_WORD = "it left no word: it is still running, or it was killed, by the system for want of memory for instance"


def _results(runs: list[Run], look: Mapping[int, Mapping[str, Any]]) -> str:
    keys = distinguishing_overrides(runs) if len(runs) > 1 else []  # one run's overrides are in the subtitle
    columns = columns_of(runs)
    head = ["run", *map(html.escape, keys), *(heading for _, heading, _ in columns), "status"]
    rows = []
    for run in runs:
        swatch = f'<span class="key" style="background: {look[run.number]["color"]}"></span> {run.number}'
        numbers = [f"{run.metrics[name]:{spec}}" if name in run.metrics else ABSENT for name, _, spec in columns]
        status = f'<td class="failed">{run.status}</td>' if run.status == "failed" else html.escape(run.status)
        cells = [html.escape(run.overrides.get(key, ABSENT)) for key in keys]
        rows.append([swatch, *cells, *(f'<td class="number">{cell}</td>' for cell in numbers), status])
    return _table(head, rows)


def _memory(runs: list[Run], look: Mapping[int, Mapping[str, Any]]) -> str:
    peaks = {run.number: [(p, run.metrics.get(f"memory/{p}_gib")) for p in PHASES] for run in runs}
    known = [value for values in peaks.values() for _, value in values if value is not None]
    if not known:
        return ""
    lines = ['<h2>Peak memory per phase</h2>\n<div class="bars" id="memory">']
    for run in runs:
        measured = [(phase, value) for phase, value in peaks[run.number] if value is not None]
        if not measured:
            continue
        lines.append(f"<h3>{html.escape(_label(run, runs))}</h3>")
        for phase, value in measured:
            style = f"width: {72 * value / max(known):.2f}%; background: {look[run.number]['color']}"
            lines.append(
                f'<span class="phase">{phase}</span><span class="bar"><i style="{style}"></i>{value:.3f} GiB</span>'
            )
    return "\n".join([*lines, "</div>"])


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return f'<td class="long">{html.escape(text)}</td>' if len(text) > 40 else html.escape(text)


def _configuration(runs: list[Run]) -> str:
    differing, same = differing_keys(run.config for run in runs)
    if not differing and not same:
        return '<p class="soft">No run has left its configuration.</p>'
    head = ["", *(html.escape(_label(run, runs)) for run in runs)]
    rows = [
        [html.escape(key), *(_cell(run.config.get(key, ABSENT)) if run.config else ABSENT for run in runs)]
        for key in differing
    ]
    first = next(run.config for run in runs if run.config)
    shared = _table(["", "value"], [[html.escape(key), _cell(first[key])] for key in same])
    parts = [_table(head, rows)] if rows else []
    kind = "the same in all runs" if len(runs) > 1 else "all of it"
    summary = f'<summary class="soft">{kind}: {len(same)} entries</summary>'
    return "\n".join([*parts, f"<details>{summary}{shared}</details>"])


def _environment(runs: list[Run]) -> str:
    differing, same = differing_keys(run.environment for run in runs)
    if not differing and not same:
        return '<p class="soft">No run has left a word of it.</p>'
    first = next(run.environment for run in runs if run.environment)
    rows = [[html.escape(key), _cell(first[key])] for key in same]
    for key in differing:
        values = [
            f"{html.escape(_label(run, runs))}: {html.escape(str(run.environment.get(key, ABSENT)))}" for run in runs
        ]
        rows.append([html.escape(key), f'<td class="long">{"<br>".join(values)}</td>'])
    return _table(["", ""], rows)
