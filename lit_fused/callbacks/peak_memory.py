"""``PeakMemoryMonitor``: peak memory of every optimiser step and of its phases: forward, backward, optimiser.

Hooks divide a step into phases. Each hook reads and resets the peak since the last one. On CUDA that is the caching
allocator's own peak, read without synchronising. On a Linux CPU it is the process's peak resident memory (VmHWM), which
the kernel resets when 5 is written to /proc/self/clear_refs. With accumulation, a step's figure is the maximum over its
micro-batches. The maximum over ranks is logged, and on request each rank's figure.

The names, all in GiB, are memory/peak_allocated_gib, memory/forward_gib, memory/backward_gib, memory/optimizer_gib, on
CUDA memory/peak_reserved_gib, and with ``per_rank`` memory/rank_0_gib, memory/rank_1_gib, ... On a CPU "allocated" is
the whole process, with its libraries. A pipeline's forward runs inside of its backward, so the two are one phase there,
"backward".
"""

import contextlib
import ctypes
import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from rich.table import Table

from lit_fused.callbacks.training_progress import console_beside_bar
from lit_fused.modules.fused_lm import FusedLMModule
from lit_fused.parallel import placement_of

_GIB = 2**30


class _PeakReader(Protocol):
    def reset(self) -> None:
        """Start a phase."""

    def read(self) -> dict[str, int]:
        """Return the bytes at the peak since the last reset: "allocated", and on CUDA "reserved"."""
        ...


class _CudaPeak:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def read(self) -> dict[str, int]:
        return {
            "allocated": torch.cuda.max_memory_allocated(self.device),
            "reserved": torch.cuda.max_memory_reserved(self.device),
        }


class _ProcessPeak:
    """Peak resident memory of this process; raises OSError if the kernel does not report it."""

    def __init__(self) -> None:
        gc.collect()
        # Memory that earlier runs of this process have freed goes back to the system, or else it would count here.
        with contextlib.suppress(OSError):  # another C library than glibc
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        self.reset()
        self.read()

    def reset(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> dict[str, int]:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return {"allocated": int(line.split()[1]) * 1024}
        raise OSError("no VmHWM in /proc/self/status")


class PeakMemoryMonitor(L.Callback):
    """Logs each step's peak memory and prints a table at the end of fit.

    Args:
        summary: print the table.
        per_rank: log and show each rank's peak as well.

    Attributes:
        peaks: after fit, the largest GiB of each of "forward", "backward", "optimizer", over steps and ranks.
        peaks_by_rank: after fit, the same of each rank alone.
    """

    def __init__(self, summary: bool = True, per_rank: bool = False) -> None:
        self.summary = summary
        self.per_rank = per_rank
        self.peaks: dict[str, float] = {}
        self.peaks_by_rank: list[dict[str, float]] = []
        self._reader: _PeakReader | None = None
        self._step: dict[str, dict[str, int]] = {}  # phase -> figures of the current optimiser step

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        device = trainer.strategy.root_device
        self.peaks, self.peaks_by_rank, self._step = {}, [], {}
        try:
            self._reader = _CudaPeak(device) if device.type == "cuda" else _ProcessPeak()
        except OSError as error:
            self._reader = None
            rank_zero_warn(f"PeakMemoryMonitor logs nothing: it needs CUDA, or Linux's /proc/self/clear_refs ({error})")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._reader:
            self._reader.reset()

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor) -> None:
        if not placement_of(trainer.strategy).forward_in_backward:
            self._end_of("forward")

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end_of("backward")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._end_of("optimizer")
        if self._reader is None or trainer.fit_loop._should_accumulate():
            return
        gib = {phase: figures["allocated"] / _GIB for phase, figures in self._step.items()}
        for phase, value in gib.items():
            self.peaks[phase] = max(value, self.peaks.get(phase, 0.0))
        peak = max(gib.values())
        values = {"memory/peak_allocated_gib": peak} | {f"memory/{phase}_gib": value for phase, value in gib.items()}
        reserved = [figures["reserved"] for figures in self._step.values() if "reserved" in figures]
        if reserved:
            values["memory/peak_reserved_gib"] = max(reserved) / _GIB
        self._step = {}
        by_rank = self._of_all_ranks(values, trainer)
        over_ranks = dict(zip(values, by_rank.amax(0), strict=True))
        pl_module.log("memory/peak_allocated_gib", over_ranks.pop("memory/peak_allocated_gib"), prog_bar=True)
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
            of_ranks = self.peaks_by_rank if self.per_rank else []
            name_of = placement_of(trainer.strategy).name_of_rank
            by_name = {name_of(rank): peaks for rank, peaks in enumerate(of_ranks)}
            console_beside_bar(trainer).print(_summary(self.peaks, by_name, logits))

    def _of_all_ranks(self, values: Mapping[str, float], trainer: L.Trainer) -> torch.Tensor:
        """Return the values of every rank, (ranks, values) float32."""
        mine = torch.tensor(list(values.values()), dtype=torch.float32, device=trainer.strategy.root_device)
        return placement_of(trainer.strategy).from_all_ranks(mine)

    def _end_of(self, phase: str) -> None:
        if self._reader is None:
            return
        figures = self._reader.read()
        so_far = self._step.get(phase, {})
        self._step[phase] = {name: max(value, so_far.get(name, 0)) for name, value in figures.items()}
        self._reader.reset()


def _summary(
    peaks: Mapping[str, float], by_rank: Mapping[str, Mapping[str, float]], logits: tuple[str, float] | None
) -> Table:
    table = Table(title="Peak memory per phase")
    table.add_column("phase")
    table.add_column("GiB", justify="right")
    for name in by_rank:
        table.add_column(name, justify="right")
    columns = [peaks, *by_rank.values()]
    for phase in peaks:
        table.add_row(phase, *(f"{column[phase]:.3f}" for column in columns))
    table.add_row("peak", *(f"{max(column.values()):.3f}" for column in columns), style="bold")
    if logits is not None:
        table.add_section()
        table.add_row(logits[0], f"{logits[1]:.3f}")
    return table
