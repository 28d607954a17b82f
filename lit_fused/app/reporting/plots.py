"""Draw pictures of one run, for loggers that show images: peak memory per phase, and the losses."""

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

from lit_fused.app.reporting.sweep import PALETTE, PHASES, Run, new_figure, read_series

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def run_pictures(run: Run) -> dict[str, bytes]:
    """Return PNG files, by name, of the run's measurements; UserError without matplotlib."""
    pictures = {}
    phases = {phase: run.metrics[f"memory/{phase}_gib"] for phase in PHASES if f"memory/{phase}_gib" in run.metrics}
    if phases:
        pictures["memory"] = _picture(lambda axes: _draw_memory(axes, phases))
    losses = {name: points for name, points in read_series(run).items() if name in ("train/loss", "val/loss")}
    if losses:
        pictures["loss"] = _picture(lambda axes: _draw_losses(axes, losses))
    return pictures


def _picture(draw: Callable[["Axes"], None]) -> bytes:
    figure = new_figure((7, 4))
    draw(figure.subplots())
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _draw_memory(axes: "Axes", phases: dict[str, float]) -> None:
    bars = axes.barh(list(phases), list(phases.values()), color=PALETTE[0])
    axes.bar_label(bars, fmt="%.3f", padding=4)
    axes.invert_yaxis()
    axes.set(title="Peak memory per phase", xlabel="GiB", xlim=(0, 1.2 * max(phases.values())))


def _draw_losses(axes: "Axes", losses: dict[str, list[tuple[int, float]]]) -> None:
    for (name, points), color in zip(losses.items(), PALETTE, strict=False):
        axes.plot(*zip(*points, strict=True), color=color, label=name, marker="o" if len(points) == 1 else None)
    axes.set(title="Loss", xlabel="optimizer step", ylabel="nats per token")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
