"""Show the progress of a run by Lightning's bars, and print beside them."""

import sys

import lightning as L
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from rich.console import Console

_BATCHES_OF_A_LOG = 20  # between two states of the bar in a file


def progress_bar() -> ProgressBar:
    """Return Lightning's rich bar for a terminal; where output goes to a file or a pipe, or the terminal cannot move
    its cursor, its plain one, which writes its state every few batches."""
    is_terminal = sys.stdout.isatty() and not Console().is_dumb_terminal
    return RichProgressBar() if is_terminal else TQDMProgressBar(refresh_rate=_BATCHES_OF_A_LOG)


def console_beside_bar(trainer: L.Trainer) -> Console:
    """Return the console of a live rich bar, which moves the bar below what is printed; else a new one."""
    bar = trainer.progress_bar_callback
    return bar.progress.console if isinstance(bar, RichProgressBar) and bar.progress is not None else Console()


def total_steps(trainer: L.Trainer) -> float:
    """Return the optimiser step at which the run ends; infinity where neither ``max_steps`` nor epochs tell."""
    steps = trainer.estimated_stepping_batches
    return float("inf") if steps == -1 else steps
