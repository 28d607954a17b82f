"""Show the progress of a run: Lightning's rich bar in a terminal, lines in a file or a pipe; and print beside them."""

import sys
import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

_SHORT = {  # of what is shown: name and format, before or after the number
    "train/loss": "loss {:.3f}",
    "val/loss": "val loss {:.3f}",
    "throughput/tokens_per_sec": "{:,.0f} tokens/s",
    "throughput/mfu": "{:.1%} MFU",
    "memory/peak_allocated_gib": "peak {:.2f} GiB",
}
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


def _in_words(metrics: dict[str, Any]) -> list[str]:
    """Return what a bar or a line shows of the metrics with ``prog_bar=True``: the best known ones, then others."""
    found = [text.format(metrics[name]) for name, text in _SHORT.items() if isinstance(metrics.get(name), int | float)]
    hidden = (*_SHORT, "v_num", "val/perplexity")
    others = {name: value for name, value in metrics.items() if name not in hidden}
    return found + [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in others.items()
    ]


class _Epoch(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.description.partition("/")[0].strip())  # Lightning writes "Epoch 0/-2" without an end.


class RunBar(RichProgressBar):
    """Lightning's rich bar, with metrics as words that fit on a line."""

    def configure_columns(self, trainer: L.Trainer) -> list[Any]:
        batches = TextColumn("{task.completed:.0f}/{task.total:.0f}")
        return [_Epoch(), BarColumn(bar_width=20), batches, TimeRemainingColumn(compact=True)]

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        words = _in_words(super().get_metrics(trainer, pl_module))
        return {"": "  ".join(words)} if words else {}


class ProgressLines(ProgressBar):
    """Prints the step and the metrics every ten seconds, after each validation, and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._is_on, self._next = True, 0.0

    def enable(self) -> None:
        self._is_on = True

    def disable(self) -> None:  # Lightning calls it on other ranks than the first.
        self._is_on = False

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any) -> None:
        if time.monotonic() >= self._next:
            self._write(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._write(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer, pl_module)

    def _write(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self._is_on:
            step = f"step {trainer.global_step}/{total_steps(trainer):.0f}"
            print(", ".join([step, *_in_words(self.get_metrics(trainer, module))]), flush=True)
            self._next = time.monotonic() + _EVERY_SECONDS
