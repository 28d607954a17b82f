"""Draw a sweep, and for loggers that show images one run: peak memory, and losses."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from lit_fused.app.reporting import sweep
from lit_fused.app.reporting.sweep import Look, Run
from lit_fused.errors import needing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def _new_figure(inches: tuple[float, float]) -> Figure:
    with needing("The picture of the sweep", "report"):
        from matplotlib.figure import Figure  # without pyplot there is no window and no global state
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    return Figure(figsize=inches, dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))


def png(figure: Figure) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def run_pictures(run: Run) -> dict[str, bytes]:
    """Return PNG files, by name, of the run's measurements; UserError without matplotlib."""
    losses = {name: points for name, points in sweep.read_series(run).items() if name in ("train/loss", "val/loss")}
    figures = {name: _new_figure((7, 4)) for name, content in (("memory", run.peaks), ("loss", losses)) if content}
    if run.peaks:
        axes = figures["memory"].subplots()
        bars = axes.barh(list(run.peaks), list(run.peaks.values()), color=sweep.PALETTE[0])
        axes.bar_label(bars, fmt="%.3f", padding=4)
        axes.invert_yaxis()
        axes.set(title="Peak memory per phase", xlabel="GiB", xlim=(0, 1.2 * max(run.peaks.values())))
    if losses:
        axes = figures["loss"].subplots()
        for (name, points), color in zip(losses.items(), sweep.PALETTE, strict=False):
            axes.plot(*zip(*points, strict=True), color=color, label=name, marker="o" if len(points) == 1 else None)
        axes.set(title="Loss", xlabel="optimizer step", ylabel="nats per token")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    return {name: png(figure) for name, figure in figures.items()}


def sweep_figure(runs: list[Run]) -> Figure:
    """Draw memory against speed, the peak memory of each run, and the training losses; UserError without matplotlib."""
    keys, failed = sweep.distinguishing_overrides(runs), sum(run.status == "failed" for run in runs)
    count = f"{len(runs)} run{'s' if len(runs) > 1 else ''}" + (f", {failed} failed" if failed else "")
    runs, others = sweep.drawn(runs)
    looks, count = sweep.looks_of(runs), count + (others and f"; {others}")
    figure = _new_figure((18, max(4.8, 1.6 + 0.34 * len(runs))))
    figure.suptitle(f"Sweep over {', '.join(keys)}: {count}" if keys else f"Sweep: {count}", fontsize=14)
    panels = _draw_places, _draw_memory, _draw_losses
    for axes, draw in zip(figure.subplots(1, 3, width_ratios=[1, 1, 1.25]), panels, strict=True):
        draw(axes, runs, keys, looks)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _label(values: tuple[str, ...]) -> str:
    return " · ".join(value if len(value) <= 20 else f"{value[:9]}…{value[-10:]}" for value in values)


def _draw_places(axes: Axes, runs: list[Run], keys: list[str], looks: list[Look]) -> None:
    for run, look in zip(runs, looks, strict=True):
        if run.place is not None:
            axes.plot(*run.place, color=look.color, marker="o", fillstyle="none" if look.dash else "full", markersize=9)
    axes.set(title="Memory against speed", xlabel="tokens/s", ylabel="peak memory (GiB)")
    axes.margins(0.15)
    axes.grid(alpha=0.3)


def _draw_memory(axes: Axes, runs: list[Run], keys: list[str], looks: list[Look]) -> None:
    name, heading, spec = sweep.COLUMNS[-1]
    peaks = [run.metrics.get(name, 0.0) for run in runs]
    without = {True: "failed", False: "not measured"}
    texts = [f"{run.metrics[name]:{spec}}" if name in run.metrics else without[run.status == "failed"] for run in runs]
    bars = axes.barh(range(len(runs)), peaks, height=0.7, color=[look.color for look in looks])
    axes.bar_label(bars, labels=texts, padding=4)
    axes.set_yticks(range(len(runs)), labels=[_label(run.values(keys)) for run in runs])
    axes.set_ylim(max(len(runs), 4) - 0.5, -0.5)  # run 0 on top, as in the table
    axes.set_xlim(0, 1.3 * max(peaks) or 1)  # room for the numbers
    axes.set(title="Peak memory", xlabel=heading, ylabel=" · ".join(keys))
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _draw_losses(axes: Axes, runs: list[Run], keys: list[str], looks: list[Look]) -> None:
    for run, look in zip(runs, looks, strict=True):
        points = sweep.read_series(run).get("train/loss", [])
        dashes = 0, tuple(length / look.width for length in look.dash)  # matplotlib multiplies: dashes coincide
        # Thin lines are drawn above wide ones, because exact losses coincide.
        line = {"color": look.color, "lw": look.width, "ls": dashes, "zorder": 3 - look.width / 10}
        axes.plot([step for step, _ in points], [loss for _, loss in points], **line, label=_label(run.values(keys)))
    axes.set(title="Training loss", xlabel="optimizer step", ylabel="training loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(title=" · ".join(keys), loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, handlelength=3.2)
