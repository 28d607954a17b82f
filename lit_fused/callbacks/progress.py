"""Progress of a whole run: steps, time left, loss, learning rate, tokens per second, MFU and peak memory.

On a terminal a rich bar with the figures below it, which fill as many lines as the width needs; elsewhere (a pipe, a
file, TERM=dumb) plain lines of tqdm, one every ten seconds. Both count optimiser steps up to the end of the run, by
``max_steps`` or ``max_epochs``, whichever comes first. What is logged with ``prog_bar=True`` is shown.

The figures are read only when they are shown, a few times per second: reading them waits for the GPU.
"""

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import timedelta
from time import perf_counter
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import ProgressColumn, Task
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

_REFRESH_SECONDS = 0.25
_STEPS_OF_PACE = 100  # the time left is judged by the last ones


class _Pace:
    """The time that is left, judged by the steps that ended last. Time spent in validation does not count."""

    def __init__(self) -> None:
        self._ends: deque[tuple[float, int]] = deque(maxlen=_STEPS_OF_PACE)  # (seconds, step)
        self._validation = 0.0
        self._validation_start = 0.0

    def step_ended(self, step: int) -> None:
        self._ends.append((perf_counter() - self._validation, step))

    def pause(self) -> None:
        self._validation_start = perf_counter()

    def go_on(self) -> None:
        self._validation += perf_counter() - self._validation_start

    def left(self, total: float) -> timedelta | None:
        """Up to step ``total``; None where there is no end, or before the second step."""
        if len(self._ends) < 2 or total == float("inf"):
            return None
        (start, first), (end, last) = self._ends[0], self._ends[-1]
        return timedelta(seconds=round((end - start) / max(last - first, 1) * max(total - last, 0)))


def total_steps(trainer: L.Trainer) -> float:
    """Optimiser steps at the end of the run: by ``max_steps`` or ``max_epochs``; infinite where neither says."""
    limits = [float("inf")]
    if trainer.max_steps != -1:
        limits.append(trainer.max_steps)
    if trainer.max_epochs is not None and trainer.max_epochs != -1:
        limits.append(trainer.max_epochs * -(-trainer.num_training_batches // trainer.accumulate_grad_batches))
    return min(limits)


def figures(trainer: L.Trainer) -> list[str]:
    """What is worth a look while a run goes on, as short texts, the most important first."""
    values = {name: float(value) for name, value in trainer.progress_bar_metrics.items()}
    texts = []
    if "train/loss" in values:
        texts.append(f"loss {values.pop('train/loss'):.3f}")
    if trainer.optimizers:
        texts.append(f"lr {_power(trainer.optimizers[0].param_groups[0]['lr'])}")
    if "throughput/tokens_per_sec" in values:
        texts.append(f"{values.pop('throughput/tokens_per_sec'):,.0f} tokens/s")
    if "throughput/mfu" in values:
        texts.append(f"MFU {values.pop('throughput/mfu'):.1%}")
    if "memory/peak_allocated_gib" in values:
        texts.append(f"peak {values.pop('memory/peak_allocated_gib'):.2f} GiB")
    rest = ((name.replace("/", " "), value) for name, value in values.items())
    return texts + [f"{name} {value:.3f}" if name.endswith("loss") else f"{name} {value:.4g}" for name, value in rest]


def _power(rate: float) -> str:
    digits, _, exponent = f"{rate:.1e}".partition("e")
    return f"{digits}e{int(exponent)}" if rate else "0"


def _count(completed: float, total: float | None) -> str:
    return f"{completed:,.0f}" + ("" if total is None or total == float("inf") else f"/{total:,.0f}")


class _View:
    """A task: one line with a bar, and below it texts, as many on a line as there is room for."""

    def __init__(self, task: Task, left: timedelta | None, texts: Iterable[str]) -> None:
        self.task, self.left, self.texts = task, left, list(texts)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(20, options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        task, endless = self.task, self.task.total is None or self.task.total == float("inf")
        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        bar = Bar(total=None if endless else task.total, completed=task.completed, pulse=endless)
        end = [f"{task.percentage:.0f}%"] if not endless else []
        end += [f"{self.left} left"] if self.left else []
        line.add_row(f"{task.description} {_count(task.completed, task.total)}", bar, "  ".join(end))
        yield line
        for text in _lines(self.texts, options.max_width):
            yield Text(text, no_wrap=True, overflow="ellipsis")


def _lines(texts: Iterable[str], width: int) -> Iterator[str]:
    line = ""
    for text in texts:
        if line and len(line) + 3 + len(text) > width:
            yield line
            line = ""
        line = f"{line} · {text}" if line else text
    if line:
        yield line


class _Column(ProgressColumn):
    def __init__(self, bar: "RunProgressBar") -> None:
        super().__init__()
        self.bar = bar

    def render(self, task: Task) -> _View:
        bar = self.bar
        return _View(task, bar.left, bar.texts) if task.id == bar.train_progress_bar_id else _View(task, None, [])


class RunProgressBar(RichProgressBar):
    """Lightning's rich bar over the steps of the whole run, with :func:`figures` below it."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=round(1 / _REFRESH_SECONDS))
        self.left: timedelta | None = None
        self.texts: list[str] = []
        self._pace = _Pace()
        self._shown = 0.0

    @property
    def validation_description(self) -> str:
        return "Validation, batch"

    def configure_columns(self, trainer: L.Trainer) -> list[Any]:
        return [_Column(self)]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._pace, self.left, self.texts = _Pace(), None, []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.is_disabled or self.progress is None:
            return
        description = f"Epoch {trainer.current_epoch}, step"
        if self.train_progress_bar_id is None:
            task = self._add_task(total_steps(trainer), description)
            self.progress.update(task, completed=trainer.global_step)
            self.train_progress_bar_id = task
        else:
            self.progress.update(self.train_progress_bar_id, description=description)
        self.refresh()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.is_disabled or trainer.fit_loop._should_accumulate():
            return
        self._pace.step_ended(trainer.global_step)
        if perf_counter() - self._shown >= _REFRESH_SECONDS:
            self._show(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pass  # an epoch ends nothing here

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        self._pace.pause()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        self._pace.go_on()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._show(trainer)

    def _update_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.training or trainer.state.fn == "fit":
            self._show(trainer)

    def _show(self, trainer: L.Trainer) -> None:
        if self.is_disabled or self.progress is None or self.train_progress_bar_id is None:
            return
        self.left, self.texts = self._pace.left(total_steps(trainer)), figures(trainer)
        self._update(self.train_progress_bar_id, trainer.global_step)
        self._shown = perf_counter()


class _Lines:
    """A file for tqdm in which every state of a bar is a line of its own."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), flush=True)

    def flush(self) -> None:
        pass


class PlainProgress(TQDMProgressBar):
    """Lines of tqdm with :func:`figures`, for what is no terminal.

    Args:
        seconds: between two lines, at least; the first step and the last have one too.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        super().__init__()
        self.seconds = seconds
        self._pace = _Pace()
        self._shown = float("-inf")

    def init_train_tqdm(self) -> Tqdm:
        return self._new("step", "{desc} {n_fmt}/{total_fmt}{postfix}")

    def init_sanity_tqdm(self) -> Tqdm:
        return Tqdm(disable=True)

    def init_validation_tqdm(self) -> Tqdm:
        return Tqdm(disable=True) if self.trainer.state.fn == "fit" else self._new("Validation")

    def init_test_tqdm(self) -> Tqdm:
        return self._new("Testing")

    def init_predict_tqdm(self) -> Tqdm:
        return self._new("Predicting")

    def _new(self, description: str, form: str = "{desc} {n_fmt}/{total_fmt}") -> Tqdm:
        # delayed for ever: nothing but what refresh() writes
        return Tqdm(desc=description, disable=self.is_disabled, file=_Lines(), bar_format=form, position=0, delay=1e9)

    def _should_update(self, current: int, total: int | float) -> bool:
        due = self.is_enabled and (current == total or perf_counter() - self._shown >= self.seconds)
        if due:
            self._shown = perf_counter()
        return due

    def on_train_start(self, *arguments: Any) -> None:
        super().on_train_start(*arguments)
        self._pace = _Pace()

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        total = total_steps(trainer)
        self.train_progress_bar.total = None if total == float("inf") else int(total)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.is_disabled or trainer.fit_loop._should_accumulate():
            return
        self._pace.step_ended(trainer.global_step)
        if self._should_update(trainer.global_step, float("inf")):
            self._show(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pass

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        self._pace.pause()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.trainer.state.fn == "fit":  # no line for this: the next one has what it measured
            self._pace.go_on()
            self.reset_dataloader_idx_tracker()
        else:
            super().on_validation_end(trainer, pl_module)

    def on_train_end(self, *_: Any) -> None:
        if self.is_enabled:
            self._show(self.trainer)
        self.train_progress_bar.close()

    def _show(self, trainer: L.Trainer) -> None:
        left = self._pace.left(total_steps(trainer))
        bar = self.train_progress_bar
        bar.n = trainer.global_step
        bar.set_postfix_str(", ".join([*([f"{left} left"] if left else []), *figures(trainer)]), refresh=False)
        bar.refresh()


def progress_bar() -> ProgressBar:
    """A bar on a terminal; lines where output goes to a file or a pipe, or the terminal cannot move its cursor."""
    terminal = sys.stdout.isatty() and not Console().is_dumb_terminal
    return RunProgressBar() if terminal else PlainProgress()


def console_beside_bar(trainer: L.Trainer) -> Console:
    """The console of a live rich bar, which moves the bar out of the way of what is printed; else a new one."""
    bar = trainer.progress_bar_callback
    if isinstance(bar, RichProgressBar) and bar.progress is not None:
        return bar.progress.console
    return Console()
