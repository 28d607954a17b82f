"""Write ``environment.json`` when a run starts, and ``summary.json``, ``report.html`` and results when it ends."""

import contextlib
import json
import math
import os
import platform
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from lit_fused.app.command_line import command_line
from lit_fused.app.loggers import log_image
from lit_fused.app.reporting.page import write_run_page
from lit_fused.app.reporting.plots import run_pictures
from lit_fused.app.reporting.sweep import Run, read_run
from lit_fused.app.run_folder import write_whole
from lit_fused.callbacks import ExportPretrained, PeakMemoryMonitor, SampleText, StopReport, TokenThroughput
from lit_fused.callbacks.run_checkpoint import newest_checkpoint
from lit_fused.errors import UserError
from lit_fused.training import FusedLMModule

_PACKAGES = ("lit-fused", "torch", "lightning", "transformers", "triton", "cut-cross-entropy", "liger-kernel", "peft")


def environment(trainer: L.Trainer, project: Path) -> dict[str, str]:
    """Return versions, devices, and the commit of the git repository around ``project``, if there is one."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    device, name = trainer.strategy.root_device, ""
    if device.type == "cuda":
        found["CUDA"], name = str(torch.version.cuda), torch.cuda.get_device_name(device)
    found["devices"] = f"{trainer.world_size} x {name or _processor()}"
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


def begin(trainer: L.Trainer, output_dir: str, project: str, tags: Sequence[Any] = ()) -> None:
    if trainer.is_global_zero:
        started = datetime.now(UTC).isoformat(timespec="seconds")
        command = shlex.join([*command_line(), *HydraConfig.get().overrides.task])
        found = {"started": started, "command": command, **environment(trainer, Path(project))}
        found |= {"tags": ", ".join(map(str, tags))} if tags else {}
        write_whole(Path(output_dir, "environment.json"), (json.dumps(found, indent=2) + "\n").encode())


def forget_end(folder: Path) -> None:
    """Remove what a run writes at its end from the folder of one that goes on."""
    for name in ("summary.json", "report.html"):
        (folder / name).unlink(missing_ok=True)


def _write_summary(folder: str, overrides: Iterable[str], metrics: Mapping[str, float], **more: Any) -> None:
    # JSON has no NaN and no infinity.
    measured = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    content = {**more, "overrides": list(overrides), "metrics": measured}
    write_whole(Path(folder) / "summary.json", (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def leave(cfg: DictConfig, content: Any, metrics: Mapping[str, float]) -> Path:
    """Write plan.json and return its path; in a sweep also write a summary, without which the job counts as failed."""
    file, hydra = Path(cfg.output_dir, "plan.json"), HydraConfig.get()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2) + "\n")
    if hydra.mode == RunMode.MULTIRUN:  # another folder may have the summary of a run that trained
        _write_summary(
            cfg.output_dir, hydra.overrides.task, metrics, status="planned", steps=0, tokens=0, logits_gib=0.0
        )
    return file


def report(
    trainer: L.Trainer,
    module: FusedLMModule,
    output_dir: str,
    overrides: Iterable[str],
    earlier: Run | None = None,
    tags: Sequence[Any] = (),
) -> dict[str, float]:
    """Write ``summary.json`` and ``report.html``; print the results and the places of all files. Rank zero only.

    Return the last value of everything that was logged; of memory the largest peaks, of throughput the mean; and of a
    run that was trained already what its files ``earlier`` had besides.
    """
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    folder, tokens, samples, ended = Path(output_dir), 0, {}, dict[str, Any]()
    places = {"checkpoint": newest_checkpoint(trainer), "metrics": folder / "metrics.csv", "exported model": ""}
    places |= {"summary": folder / "summary.json", "report": folder / "report.html"}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, TokenThroughput):
            tokens = callback.tokens
            measured = {"tokens_per_sec": callback.mean or None, "mfu": callback.mean_mfu}
            metrics |= {f"throughput/{name}": value for name, value in measured.items() if value is not None}
        elif isinstance(callback, PeakMemoryMonitor) and callback.peaks:
            by_rank = enumerate(callback.peaks_by_rank if callback.per_rank else [])
            metrics |= {f"memory/{phase}_gib": peak for phase, peak in callback.peaks.items()}
            metrics |= {f"memory/rank_{rank}_gib": max(peaks.values()) for rank, peaks in by_rank}
            metrics["memory/peak_allocated_gib"] = max(callback.peaks.values())
        elif isinstance(callback, SampleText):
            samples = callback.samples
        elif isinstance(callback, ExportPretrained):
            places["exported model"] = callback.folder
            ended["exported_step"] = callback.step
        elif isinstance(callback, StopReport):
            best = callback.best and callback.best._asdict()
            ended |= {"stopped_by": callback.stopped_by, "best": best}
    if earlier is not None:
        metrics, tokens, samples = earlier.metrics | metrics, earlier.tokens, earlier.samples | samples
    if trainer.is_global_zero:
        more: dict[str, Any] = {"steps": trainer.global_step, "tokens": tokens, "tags": [*tags], "samples": samples}
        more |= {"logits_gib": module.largest_logits()[1], "loss": getattr(module.model.loss, "ran", None)}
        if started := read_run(folder).environment.get("started"):
            more["seconds"] = round((datetime.now(UTC) - datetime.fromisoformat(started)).total_seconds(), 1)
        _write_summary(output_dir, overrides, metrics, status="completed", **more, **ended)
        write_run_page(folder)
        console = Console(highlight=False)
        console.print(_results(metrics))
        for name, place in places.items():
            if place and Path(place).exists():
                console.print(f"{name:<16}{os.path.relpath(place)}", soft_wrap=True)  # one line, easy to copy
    return metrics


_JUDGED = ("loss", "perplexity", "accuracy", "exact_match", "mrr")
_JUDGED += ("reward_accuracy", "reward_margin", "reward", "divergence", "teacher_nll")  # Objectives log these.
_JUDGED_AT = ("ndcg_at_", "recall_at_", "coverage_at_")  # the K of a ranking comes after


def _results(metrics: Mapping[str, float]) -> Table:
    table = Table(title="Results", show_header=False)
    shown = ("train/loss", *(f"{part}/{name}" for part in ("val", "test") for name in _JUDGED))
    of_sets = ("val/loss/", "test/loss/", *(f"{part}/{name}" for part in ("val", "test") for name in _JUDGED_AT))
    shown += tuple(name for name in metrics if name.startswith(of_sets))
    for name in (*shown, "throughput/tokens_per_sec", "throughput/mfu"):
        if name in metrics:
            table.add_row(name, f"{metrics[name]:,.0f}" if metrics[name] >= 1000 else f"{metrics[name]:.4g}")
    return table


def log_plots(trainer: L.Trainer, output_dir: str) -> None:
    """Log the run's final pictures to the loggers that show images. Do nothing without matplotlib. Rank zero only."""
    if trainer.is_global_zero and any(not isinstance(logger, CSVLogger) for logger in trainer.loggers):
        with contextlib.suppress(UserError):
            for name, picture in run_pictures(read_run(Path(output_dir))).items():
                log_image(trainer.loggers, f"plots/{name}", picture, trainer.global_step)
