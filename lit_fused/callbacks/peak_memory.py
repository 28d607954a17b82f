"""Measure the peak memory of every optimiser step and of its phases: forward, backward, optimiser."""

import contextlib
import ctypes
import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from rich.table import Column, Table

from lit_fused.callbacks.training_progress import console_beside_bar
from lit_fused.errors import checked_options
from lit_fused.parallel import on_device, placement_of
from lit_fused.training.module import FusedLMModule

_GIB = 2**30


class _PeakReader:
    """Reads and resets the peak of CUDA's allocator, or of this process; raises OSError if Linux does not report it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_cuda = device, device.type == "cuda"
        if not self.on_cuda:
            gc.collect()
            # Memory that earlier runs of this process have freed goes back to the system, or else it would count here.
            with contextlib.suppress(OSError):  # another C library than glibc
                ctypes.CDLL("libc.so.6").malloc_trim(0)
        self.reset()
        self.read()

    def reset(self) -> None:
        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM

    def read(self) -> tuple[int, int]:
        """Return the bytes that were allocated and reserved at the peak since the last reset."""
        if self.on_cuda:
            return torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        return linux_memory("VmHWM"), 0


def linux_memory(name: str) -> int:
    """Return the bytes that Linux reports of this process under a name. Raises OSError where it reports none."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {name} in /proc/self/status")


class PeakMemoryMonitor(L.Callback):
    """Logs each step's peak memory and with ``summary`` prints a table at the end of fit.

    The names, all in GiB, are memory/peak_allocated_gib, memory/forward_gib, memory/backward_gib, memory/optimizer_gib,
    on CUDA memory/peak_reserved_gib, and with ``per_rank`` memory/rank_0_gib, ... On CUDA they are the caching
    allocator's, on a Linux CPU the resident memory of the whole process. A step's figure is the maximum over its
    micro-batches and over ranks. What a strategy runs of backward inside of ``training_step`` is the phase "forward".

    Attributes:
        peaks: after fit, the largest GiB of each of "forward", "backward", "optimizer", over steps and ranks.
        peaks_by_rank: after fit, the same of each rank alone.
    """

    @checked_options()
    def __init__(self, summary: bool = True, per_rank: bool = False) -> None:
        self.summary, self.per_rank = summary, per_rank
        self.peaks: dict[str, float] = {}
        self.peaks_by_rank: list[dict[str, float]] = []
        self._reader: _PeakReader | None = None
        self._step: dict[str, tuple[int, int]] = {}  # phase -> bytes in the current optimiser step

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.peaks, self.peaks_by_rank, self._step = {}, [], {}
        self._last_step = trainer.global_step
        try:
            self._reader = _PeakReader(trainer.strategy.root_device)
        except OSError as error:
            self._reader = None
            rank_zero_warn(f"PeakMemoryMonitor logs nothing: it needs CUDA, or Linux's /proc/self/clear_refs ({error})")

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        if self._reader:
            self._reader.reset()

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor) -> None:
        self._end_of("forward")

    def on_after_backward(self, *_: Any, **__: Any) -> None:
        self._end_of("backward")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any) -> None:
        self._end_of("optimizer")
        if self._reader is None or trainer.global_step == self._last_step:  # Its other micro-batches are to come.
            return
        self._last_step = trainer.global_step
        gib = {phase: allocated / _GIB for phase, (allocated, _) in self._step.items()}
        self.peaks |= {phase: max(value, self.peaks.get(phase, 0.0)) for phase, value in gib.items()}
        values = {"memory/peak_allocated_gib": max(gib.values())}
        values |= {f"memory/{phase}_gib": value for phase, value in gib.items()}
        if self._reader.on_cuda:
            values["memory/peak_reserved_gib"] = max(reserved for _, reserved in self._step.values()) / _GIB
        self._step = {}
        by_rank = self._of_all_ranks(values, trainer)
        over_ranks = dict(zip(values, by_rank.amax(0), strict=True))
        peak = over_ranks.pop("memory/peak_allocated_gib")
        pl_module.log("memory/peak_allocated_gib", peak, prog_bar=not peak.is_cuda)  # A bar reads at once, and waits.
        pl_module.log_dict(over_ranks)
        if self.per_rank:
            pl_module.log_dict({f"memory/rank_{rank}_gib": peak for rank, peak in enumerate(by_rank[:, 0])})

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.peaks:
            return
        by_rank = self._of_all_ranks(self.peaks, trainer).tolist()
        self.peaks_by_rank = [dict(zip(self.peaks, values, strict=True)) for values in by_rank]
        self.peaks = {phase: max(peaks[phase] for peaks in self.peaks_by_rank) for phase in self.peaks}
        if self.summary and trainer.is_global_zero:
            logits = pl_module.largest_logits() if isinstance(pl_module, FusedLMModule) else None
            name_of = placement_of(trainer.strategy).name_of_rank
            of_ranks = enumerate(self.peaks_by_rank if self.per_rank else [])
            columns = {"GiB": self.peaks} | {name_of(rank): peaks for rank, peaks in of_ranks}
            console_beside_bar(trainer).print(_summary(columns, logits))

    def _of_all_ranks(self, values: Mapping[str, float], trainer: L.Trainer) -> torch.Tensor:
        mine = torch.tensor(list(values.values()), dtype=torch.float32)
        if trainer.world_size > 1:  # Otherwise the numbers stay here, where loggers read them.
            mine = on_device(mine, trainer.strategy.root_device)
        return placement_of(trainer.strategy).from_all_ranks(mine)  # (ranks, values) float32

    def _end_of(self, phase: str) -> None:
        if self._reader is not None:
            allocated, reserved = self._reader.read()
            before = self._step.get(phase, (0, 0))
            self._step[phase] = max(allocated, before[0]), max(reserved, before[1])
            self._reader.reset()


def _summary(columns: Mapping[str, Mapping[str, float]], logits: tuple[str, float] | None) -> Table:
    table = Table("phase", *(Column(name, justify="right") for name in columns), title="Peak memory per phase")
    for phase in columns["GiB"]:
        table.add_row(phase, *(f"{peaks[phase]:.3f}" for peaks in columns.values()))
    table.add_row("peak", *(f"{max(peaks.values()):.3f}" for peaks in columns.values()), style="bold")
    if logits is not None:
        table.add_section()
        table.add_row(logits[0], f"{logits[1]:.3f}")
    return table
