"""Write the files of a run: ``environment.json`` at its start; at its end ``summary.json`` for sweeps and scripts, and
``report.html`` and one table of results and places for a person.
"""

import contextlib
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.table import Table

from lit_fused.app.loggers import log_image
from lit_fused.app.reporting.files import write_run_page, write_whole
from lit_fused.app.reporting.plots import run_pictures
from lit_fused.app.reporting.sweep import read_run
from lit_fused.callbacks import ExportPretrained, PeakMemoryMonitor, TokenThroughput
from lit_fused.errors import UserError
from lit_fused.modules import FusedLMModule

_PACKAGES = ("lit-fused", "torch", "lightning", "transformers", "triton", "cut-cross-entropy", "liger-kernel", "peft")


@dataclass(frozen=True)
class RunSummary:
    """The content of a finished run's ``summary.json``.

    ``metrics`` has the last value of everything logged, but the largest peaks of memory and the mean throughput.
    """

    status: str
    overrides: list[str]
    steps: int
    tokens: int
    logits_gib: float
    metrics: dict[str, float]


def environment(trainer: L.Trainer, project: Path) -> dict[str, str]:
    """Return versions, devices, and the commit of the git repository around ``project``, if there is one."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    device = trainer.strategy.root_device
    if device.type == "cuda":
        found["CUDA"] = str(torch.version.cuda)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    found["devices"] = f"{trainer.world_size} x {name}"
    commit = _git(project, "rev-parse", "HEAD")
    if commit:
        changed = ", with changes that are not committed" if _git(project, "status", "--porcelain") else ""
        found["commit"] = commit[:12] + changed
    return found


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git(folder: Path, *arguments: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    return ""


def begin(trainer: L.Trainer, output_dir: str | Path, project: str | Path) -> None:
    """Write ``environment.json``, and remove the end of an earlier run in the same folder. Rank zero only."""
    if trainer.is_global_zero:
        folder = Path(output_dir)
        for name in ("summary.json", "report.html"):
            (folder / name).unlink(missing_ok=True)
        found = environment(trainer, Path(project))
        write_whole(folder / "environment.json", (json.dumps(found, indent=2) + "\n").encode())


def summarize(trainer: L.Trainer, module: FusedLMModule, overrides: Sequence[str]) -> RunSummary:
    """Collect the numbers of a run that has ended."""
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    throughput, monitor = _callback(trainer, TokenThroughput), _callback(trainer, PeakMemoryMonitor)
    if throughput is not None and throughput.mean:
        metrics["throughput/tokens_per_sec"] = throughput.mean
        if throughput.mean_mfu is not None:
            metrics["throughput/mfu"] = throughput.mean_mfu
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
    """Return the first of the trainer's callbacks of a kind, or None."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((c for c in callbacks if isinstance(c, kind)), None)


def report(trainer: L.Trainer, module: FusedLMModule, output_dir: str | Path, overrides: Sequence[str]) -> RunSummary:
    """Write ``summary.json`` and ``report.html``; print the results and the places of all files. Rank zero only."""
    summary = summarize(trainer, module, overrides)
    if trainer.is_global_zero:
        folder = Path(output_dir)
        write_whole(folder / "summary.json", (json.dumps(asdict(summary), indent=2) + "\n").encode())
        write_run_page(folder)
        console = Console(highlight=False)
        console.print(_results(summary))
        for name, place in _places(trainer, folder).items():
            console.print(f"{name:<16}{os.path.relpath(place)}", soft_wrap=True)  # one line, easy to copy
    return summary


def _results(summary: RunSummary) -> Table:
    table = Table(title="Results", show_header=False)
    shown = ("train/loss", "val/loss", "val/perplexity", "val/accuracy", "val/exact_match")
    of_filter = ("train/dropped_mass", "train/exact_tokens")  # they show if loss=filtered has skipped anything
    for name in (*shown, *of_filter, "throughput/tokens_per_sec", "throughput/mfu"):
        if name in summary.metrics:
            value = summary.metrics[name]
            table.add_row(name, f"{value:,.0f}" if value >= 1000 else f"{value:.4g}")
    return table


def _places(trainer: L.Trainer, folder: Path) -> dict[str, Path]:
    """Return the paths of the run's files and folders that exist."""
    export = _callback(trainer, ExportPretrained)
    places = {
        "checkpoint": getattr(trainer.checkpoint_callback, "last_model_path", ""),
        "metrics": folder / "metrics.csv",
        "exported model": export.folder if export else "",
        "summary": folder / "summary.json",
        "report": folder / "report.html",
    }
    return {name: Path(place) for name, place in places.items() if place and Path(place).exists()}


def log_plots(trainer: L.Trainer, output_dir: str | Path) -> None:
    """Log the run's final pictures to the loggers that show images. Do nothing without matplotlib. Rank zero only."""
    if trainer.is_global_zero and any(not isinstance(logger, CSVLogger) for logger in trainer.loggers):
        with contextlib.suppress(UserError):
            for name, picture in run_pictures(read_run(Path(output_dir))).items():
                log_image(trainer.loggers, f"plots/{name}", picture, trainer.global_step)
