"""Show the progress of a whole run: steps, time left, loss, learning rate, tokens per second, MFU and peak memory.

A terminal gets a rich bar with the figures below it; a pipe, a file or TERM=dumb gets one line every ten seconds. Both
count optimiser steps to the end of the run, and show values logged with ``prog_bar=True``. Loss and memory are those of
the last look, so that a GPU does not wait to be read.
"""

import sys
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from time import perf_counter
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from rich.columns import Columns
from rich.console import Console, Group
from rich.progress import ProgressColumn, Task
from rich.progress_bar import ProgressBar as Bar
from rich.table import Column, Table
from rich.text import Text

from lit_fused.parallel import OnTheWay

_REFRESH_SECONDS = 0.25
_STEPS_OF_PACE = 100  # the time left is estimated from the last steps
_FIGURES = {
    "train/loss": "loss {:.3f}",
    "lr": "lr {}",
    "throughput/tokens_per_sec": "{:,.0f} tokens/s",
    "throughput/mfu": "MFU {:.1%}",
    "memory/peak_allocated_gib": "peak {:.2f} GiB",
}
_STAGES: Any = {"validate": ("Validation", "val"), "test": ("Testing", "test"), "predict": ("Predicting", "predict")}


def total_steps(trainer: L.Trainer) -> float:
    """Return the optimiser step at which the run ends; infinity where neither ``max_steps`` nor epochs tell."""
    steps = trainer.estimated_stepping_batches
    return float("inf") if steps == -1 else steps


def figures(trainer: L.Trainer, late: Mapping[str, float]) -> list[str]:
    """Return short texts about the state of a run, the most important first, with numbers that came ``late``."""
    values: dict[str, Any] = {name: float(value) for name, value in trainer.progress_bar_metrics.items()}
    values |= late
    if trainer.optimizers:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        values["lr"] = f"{rate:.1e}".replace("e-0", "e-") if rate else "0"
    texts = [form.format(values.pop(name)) for name, form in _FIGURES.items() if name in values]
    rest = [(name.replace("/", " "), value) for name, value in values.items()]
    forms = (".3f" if name.endswith("loss") else ",.0f" if value >= 1000 else ".4g" for name, value in rest)
    return texts + [f"{name} {value:{form}}" for (name, value), form in zip(rest, forms, strict=True)]


def _count(completed: float, total: float | None) -> str:
    """Return "step/of steps"; a resumed run may be beyond a total that was lowered."""
    return f"{completed:,.0f}" + ("" if total in (None, float("inf")) else f"/{max(completed, total):,.0f}")


class TrainingClock(L.Callback):
    """Has a clock that stands still during validation."""

    _validation = 0.0

    @property
    def training_seconds(self) -> float:
        """The time since an arbitrary moment. It is not to be read during validation."""
        return perf_counter() - self._validation

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        self._validation -= perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        self._validation += perf_counter()


class _RunProgress(TrainingClock, ProgressBar):
    """Counts the optimiser steps of a run, and calls ``show`` at the end and, before that, every ``seconds``."""

    seconds, _shown = _REFRESH_SECONDS, float("-inf")
    reads = ("train/loss", "memory/peak_allocated_gib")  # They may be on a GPU, logged without prog_bar.
    _asked: tuple[list[str], OnTheWay] | None = None
    show: Callable[[L.Trainer], None]

    def is_due(self) -> bool:
        due = perf_counter() - self._shown >= self.seconds
        self._shown = perf_counter() if due else self._shown
        return due

    def figures(self, trainer: L.Trainer) -> list[str]:
        """Return :func:`figures`; on a GPU with the numbers that were asked for at the last call."""
        metrics = trainer.callback_metrics
        logged = {name: metrics[name] for name in self.reads if name in metrics}
        values = {name: value.item() for name, value in logged.items() if not value.is_cuda}
        if on_device := [name for name in logged if name not in values]:
            numbers = torch.stack([logged[name].double() for name in on_device])
            asked = on_device, OnTheWay(numbers, over_ranks=False)
            names, coming = self._asked or asked
            self._asked = asked if trainer.training else None
            values |= zip(names, coming.read(), strict=True)
        return figures(trainer, values)

    def time_left(self, total: float) -> timedelta | None:
        """Return the time to step ``total``; None before the second step and for an infinite total."""
        if len(self._ends) < 2 or total == float("inf"):
            return None
        (start, first), (end, last) = self._ends[0], self._ends[-1]
        return timedelta(seconds=round((end - start) / max(last - first, 1) * max(total - last, 0)))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._ends: deque[tuple[float, int]] = deque(maxlen=_STEPS_OF_PACE)  # (seconds, step)
        self._shown, self._asked = float("-inf"), None

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        self._ends.append((self.training_seconds, trainer.global_step))
        if self.is_due():
            self.show(trainer)

    def on_train_epoch_end(self, *_: Any, **__: Any) -> None: ...  # the run continues: the bar must not be reset

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.show(trainer)


class RunProgressBar(_RunProgress, RichProgressBar):
    """Lightning's rich bar over the steps of the whole run, with :func:`figures` below it."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=round(1 / _REFRESH_SECONDS))
        self.left: timedelta | None = None
        self.texts: list[str] = []

    def configure_columns(self, trainer: L.Trainer) -> list[Any]:
        return [_RunColumn(self)]

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.is_disabled or self.progress is None:
            return
        task, text = self.train_progress_bar_id, f"Epoch {trainer.current_epoch}, step"
        if task is None:
            self.left, self.texts = None, []
            task = self.train_progress_bar_id = self._add_task(total_steps(trainer), text)
        self.progress.update(task, description=text, completed=trainer.global_step)
        self.refresh()

    def show(self, trainer: L.Trainer) -> None:
        if self.is_enabled and self.train_progress_bar_id is not None:
            self.left, self.texts = self.time_left(total_steps(trainer)), self.figures(trainer)
            self._update(self.train_progress_bar_id, trainer.global_step)

    def _update_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.show(trainer)


class _RunColumn(ProgressColumn):
    """Renders a task as one line with a bar; below that of the run, its figures."""

    def __init__(self, bar: RunProgressBar) -> None:
        super().__init__()
        self.bar = bar

    def render(self, task: Task) -> Group:
        is_run, endless = task.id == self.bar.train_progress_bar_id, task.total in (None, float("inf"))
        end = [] if endless else [f"{task.percentage:.0f}%"]
        end += [f"{self.bar.left} left"] if is_run and self.bar.left else []
        line = Table.grid(Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True), padding=(0, 1), expand=True)
        bar = Bar(total=None if endless else task.total, completed=task.completed, pulse=endless)
        line.add_row(f"{task.description} {_count(task.completed, task.total)}", bar, "  ".join(end))
        texts = [Text(text, no_wrap=True, overflow="ellipsis") for text in self.bar.texts if is_run]
        return Group(line, Columns(texts, padding=(0, 2)))


class PlainProgress(_RunProgress):
    """Prints a line with :func:`figures` every few seconds, at the first step and at the last, for other outputs."""

    seconds, _enabled = 10.0, True

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def show(self, trainer: L.Trainer) -> None:
        left = self.time_left(total := total_steps(trainer))
        texts = [
            f"step {_count(trainer.global_step, total)}",
            *([f"{left} left"] if left else []),
            *self.figures(trainer),
        ]
        self._print(", ".join(texts))

    def _show_batch(self, trainer: L.Trainer, _m: Any, _o: Any, _b: Any, batch_idx: int, loader: int = 0) -> None:
        if trainer.state.fn not in _STAGES:
            return  # A fit shows validation in the next step's line.
        name, batches = _STAGES[trainer.state.fn]
        totals, loaders = getattr(trainer, f"num_{batches}_batches"), getattr(trainer, f"{batches}_dataloaders", None)
        totals = totals if isinstance(totals, list) else [totals]
        which = [*loaders][loader] if isinstance(loaders, dict) else loader + 1
        if self.is_due() or batch_idx + 1 == totals[loader]:
            label = f"{name} {which}" if len(totals) > 1 else name
            self._print(f"{label}: {_count(batch_idx + 1, totals[loader])}")

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _show_batch  # type: ignore[assignment]

    def _print(self, text: str) -> None:
        if self._enabled:
            print(text, flush=True)


def progress_bar() -> ProgressBar:
    """Return a bar for a terminal; lines if output goes to a file or a pipe, or the terminal cannot move its cursor."""
    terminal = sys.stdout.isatty() and not Console().is_dumb_terminal
    return RunProgressBar() if terminal else PlainProgress()


def console_beside_bar(trainer: L.Trainer) -> Console:
    """Return the console of a live rich bar, which moves the bar below what is printed; else a new one."""
    bar = trainer.progress_bar_callback
    return bar.progress.console if isinstance(bar, RichProgressBar) and bar.progress is not None else Console()
