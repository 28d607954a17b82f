"""Write ``summary.json`` and ``report.html`` when a run ends; print the results and what to type next."""

import json
import math
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.trainer.states import TrainerFn
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from lit_fused import __version__
from lit_fused.app.command_line import command_line
from lit_fused.app.reporting.page import write_run_page
from lit_fused.app.run_folder import write_whole
from lit_fused.callbacks import ExportPretrained, PeakMemoryMonitor, SampleText, TokenThroughput
from lit_fused.callbacks.run_checkpoint import newest_checkpoint
from lit_fused.training import FusedLMModule

_PACKAGES = ("torch", "lightning", "transformers", "triton", "cut-cross-entropy", "liger-kernel", "peft")
_SHOWN = re.compile(r"train/loss$|(val|test)/(?!(z|entropy)$)|throughput/(tokens_per_sec|mfu)$")


def write_summary(folder: str, metrics: Mapping[str, float], **more: Any) -> None:
    # JSON has no NaN and no infinity.
    measured = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    content = {**more, "metrics": measured}
    write_whole(Path(folder, "summary.json"), (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def report(trainer: L.Trainer, module: FusedLMModule, cfg: DictConfig) -> dict[str, float]:
    """Write ``summary.json`` and ``report.html``; print the results, the places of all files and what to type next.
    Return the last value of everything that was logged; of memory the largest peaks, of throughput the mean."""
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    more: dict[str, Any] = {"status": "completed", "overrides": [*HydraConfig.get().overrides.task]}
    more |= {"steps": trainer.global_step, "tags": [*cfg.tags], "tokens": 0, "samples": {}}
    folder, exported = Path(cfg.output_dir), None
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, TokenThroughput):
            more["tokens"] = callback.tokens
            measured = {"tokens_per_sec": callback.mean or None, "mfu": callback.mean_mfu}
            metrics |= {f"throughput/{name}": value for name, value in measured.items() if value is not None}
        elif isinstance(callback, PeakMemoryMonitor) and callback.peaks:
            metrics |= {f"memory/{phase}_gib": peak for phase, peak in callback.peaks.items()}
            metrics["memory/peak_allocated_gib"] = max(callback.peaks.values())
        elif isinstance(callback, SampleText):
            more["samples"] = callback.samples
        elif isinstance(callback, ExportPretrained):
            exported, more["exported_step"] = callback.folder, callback.step
    if trainer.is_global_zero:
        more |= {"environment": _environment(trainer), "logits_gib": module.largest_logits()[1]}
        ran, impl = getattr(module.model.loss, "ran", None), cfg.loss.get("impl")
        more["ran_as"] = ran if isinstance(impl, str) and ran != impl else None
        write_summary(cfg.output_dir, metrics, **more)
        write_run_page(folder)
        console, table = Console(highlight=False), Table(title="Results", show_header=False)
        for name in sorted(filter(_SHOWN.match, metrics), key=lambda name: name.startswith("throughput")):
            table.add_row(name, f"{metrics[name]:,.0f}" if metrics[name] >= 1000 else f"{metrics[name]:.4g}")
        console.print(table)
        places = {"exported model": exported, "report": folder / "report.html"}
        lines = {name: os.path.relpath(place) for name, place in places.items() if place and Path(place).exists()}
        if trainer.state.fn == TrainerFn.FITTING and newest_checkpoint(trainer):
            lines |= _next_commands(trainer, os.path.relpath(folder), generates=bool(more["samples"]))
        for name, text in lines.items():  # Each is one line, easy to copy.
            console.print(f"{name:<16}{text}", soft_wrap=True, markup=False)
    return metrics


def _environment(trainer: L.Trainer) -> dict[str, str]:
    """Return the command, versions, devices, and the commit of a git repository around the folder it was typed in."""
    hydra, device = HydraConfig.get(), trainer.strategy.root_device
    found = {"command": shlex.join([*command_line(), *hydra.overrides.task]), "python": platform.python_version()}
    found |= {"system": platform.platform(), "lit-fused": __version__}
    found |= {d.name: d.version for d in distributions() if d.name in _PACKAGES}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    found["devices"] = f"{trainer.world_size} x {name}"
    with suppress(OSError, subprocess.SubprocessError):
        describe = ["git", "-C", hydra.runtime.cwd, "describe", "--always", "--dirty"]
        found["commit"] = subprocess.run(describe, capture_output=True, text=True, timeout=9, check=True).stdout.strip()
    return found


def _next_commands(trainer: L.Trainer, run: str, *, generates: bool) -> dict[str, str]:
    """Return what can be typed next, by what it does."""
    by_steps = (trainer.max_epochs or -1) < 0 or 0 <= trainer.max_steps <= trainer.global_step
    longer = "max_steps" if by_steps else "max_epochs"
    found = {"generate": ["mode=generate", 'prompt="Once upon a time"']} if generates else {}
    tokenizer = getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
    found |= {"chat": ["mode=chat"]} if getattr(tokenizer, "chat_template", None) else {}
    found |= {"go on": [f"trainer.{longer}={2 * max(getattr(trainer, longer), 1)}"]}
    return {name: shlex.join([*command_line(), f"ckpt_path={run}", *words]) for name, words in found.items()}
