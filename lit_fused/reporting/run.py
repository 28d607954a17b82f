"""The end of a run: ``summary.json`` for sweeps and scripts, and for a person one table of results and places."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import lightning as L
from rich.console import Console
from rich.table import Table

from lit_fused.callbacks import ExportPretrained, PeakMemoryMonitor, TokenThroughput
from lit_fused.modules import FusedLMModule


@dataclass(frozen=True)
class RunSummary:
    """What a finished run leaves in ``summary.json``.

    ``metrics`` holds the last value of everything logged, the largest of memory's, and the mean throughput.
    """

    status: str
    overrides: list[str]
    steps: int
    tokens: int
    logits_gib: float
    metrics: dict[str, float]


def summarize(trainer: L.Trainer, module: FusedLMModule, overrides: Sequence[str]) -> RunSummary:
    """Collect the numbers of a run that has ended."""
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    throughput, monitor = _callback(trainer, TokenThroughput), _callback(trainer, PeakMemoryMonitor)
    if throughput is not None and throughput.mean:
        metrics["throughput/tokens_per_sec"] = throughput.mean
    if monitor is not None and monitor.peaks:
        metrics |= {f"memory/{phase}_gib": peak for phase, peak in monitor.peaks.items()}
        metrics["memory/peak_allocated_gib"] = max(monitor.peaks.values())
        if monitor.per_rank:
            of_ranks = enumerate(monitor.peaks_by_rank)
            metrics |= {f"memory/rank_{rank}_gib": max(peaks.values()) for rank, peaks in of_ranks}
    return RunSummary(
        status="completed",
        overrides=list(overrides),
        steps=trainer.global_step,
        tokens=throughput.tokens if throughput else 0,
        logits_gib=module.largest_logits()[1],
        metrics=metrics,
    )


_Callback = TypeVar("_Callback", bound=L.Callback)


def _callback(trainer: L.Trainer, kind: type[_Callback]) -> _Callback | None:
    """The first of the trainer's callbacks of a kind."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((c for c in callbacks if isinstance(c, kind)), None)


def report(trainer: L.Trainer, module: FusedLMModule, output_dir: str | Path, overrides: Sequence[str]) -> RunSummary:
    """Write ``output_dir/summary.json`` and print the results and where everything lies. Rank zero only."""
    summary = summarize(trainer, module, overrides)
    if trainer.is_global_zero:
        folder = Path(output_dir)
        temporary = folder / "summary.json.partial"
        temporary.write_text(json.dumps(asdict(summary), indent=2) + "\n")
        os.replace(temporary, folder / "summary.json")
        console = Console(highlight=False)
        console.print(_results(summary))
        for name, place in _places(trainer, folder).items():
            console.print(f"{name:<16}{os.path.relpath(place)}", soft_wrap=True)  # on one line, to be copied
    return summary


def _results(summary: RunSummary) -> Table:
    table = Table(title="Results", show_header=False)
    shown = ("train/loss", "val/loss", "val/perplexity", "val/accuracy", "val/exact_match", "throughput/tokens_per_sec")
    for name in shown:
        if name in summary.metrics:
            value = summary.metrics[name]
            table.add_row(name, f"{value:,.0f}" if value >= 1000 else f"{value:.4g}")
    return table


def _places(trainer: L.Trainer, folder: Path) -> dict[str, Path]:
    """Where what the run wrote lies, as far as it exists."""
    export = _callback(trainer, ExportPretrained)
    places = {
        "checkpoint": getattr(trainer.checkpoint_callback, "last_model_path", ""),
        "metrics": folder / "metrics.csv",
        "exported model": export.folder if export else "",
        "summary": folder / "summary.json",
    }
    return {name: Path(place) for name, place in places.items() if place and Path(place).exists()}
