"""Show the progress of a run: Lightning's rich bar in a terminal, lines in a file or a pipe; and print beside them."""

import sys
import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TimeRemainingColumn
from rich.text import Text

_SHORT = {  # name and format of what is known best
    "train/loss": ("loss", ".3f"),
    "val/loss": ("val loss", ".3f"),
    "val/ndcg_at_10": ("val NDCG@10", ".4f"),
    "throughput/tokens_per_sec": ("tokens/s", ",.0f"),
    "throughput/mfu": ("MFU", ".1%"),
    "memory/peak_allocated_gib": ("peak GiB", ".2f"),
}
_HIDDEN = {"v_num", "val/perplexity"}
_EVERY_SECONDS = 10.0


def progress_bar() -> ProgressBar:
    """Return a bar for a terminal; where output goes to a file or a pipe, or the terminal cannot move its cursor,
    lines."""
    is_terminal = sys.stdout.isatty() and not Console().is_dumb_terminal
    return RunBar() if is_terminal else ProgressLines()


def console_beside_bar(trainer: L.Trainer) -> Console:
    """Return the console of a live rich bar, which moves the bar below what is printed; else a new one."""
    bar = trainer.progress_bar_callback
    return bar.progress.console if isinstance(bar, RichProgressBar) and bar.progress is not None else Console()


def total_steps(trainer: L.Trainer) -> float:
    """Return the optimiser step at which the run ends; infinity where neither ``max_steps`` nor epochs tell."""
    steps = trainer.estimated_stepping_batches
    return float("inf") if steps == -1 else steps


def _shown(metrics: dict[str, Any]) -> dict[str, str]:
    """Return what a bar or a line shows of the metrics that are logged with ``prog_bar=True``."""
    names = [*(name for name in _SHORT if name in metrics), *(metrics.keys() - _SHORT.keys() - _HIDDEN)]
    looks = [(metrics[name], *_SHORT.get(name, (name.replace("/", " "), ".4g"))) for name in names]
    return {short: f"{value:{spec}}" if isinstance(value, int | float) else str(value) for value, short, spec in looks}


class _Step(ProgressColumn):
    """The step of the run in place of Lightning's "Epoch 0/-2", and its "Validation"."""

    def __init__(self, trainer: L.Trainer) -> None:
        super().__init__()
        self._trainer = trainer
        self._end = f"/{total_steps(trainer):.0f}" if trainer.training and trainer.max_steps != -1 else ""

    def render(self, task: Task) -> Text:
        name = task.description.strip()
        return Text(f"step {self._trainer.global_step}{self._end}" if name.startswith("Epoch") else name)


class RunBar(RichProgressBar):
    """Lightning's rich bar, with metrics that fit on a line."""

    def configure_columns(self, trainer: L.Trainer) -> list[Any]:
        return [_Step(trainer), BarColumn(bar_width=20), TimeRemainingColumn(compact=True)]

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        return dict(_shown(super().get_metrics(trainer, pl_module)))


class ProgressLines(ProgressBar):
    """Prints the step and the metrics every ten seconds, after each validation, and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._is_on, self._next, self._written = True, 0.0, 0

    def enable(self) -> None:
        self._is_on = True

    def disable(self) -> None:  # Lightning calls it on other ranks than the first.
        self._is_on = False

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any, **kwargs: Any) -> None:
        if time.monotonic() >= self._next:
            self._write(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._write(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._written != trainer.global_step:
            self._write(trainer, pl_module)

    def _write(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self._is_on:
            shown = _shown(self.get_metrics(trainer, module))
            step = f"step {trainer.global_step}/{total_steps(trainer):.0f}"
            print(", ".join([step, *(f"{name} {value}" for name, value in shown.items())]), flush=True)
            self._next, self._written = time.monotonic() + _EVERY_SECONDS, trainer.global_step
