"""The progress bar that fits the terminal, and how to print beside it."""

import sys

import lightning as L
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from rich.console import Console


class StepwiseRichProgressBar(RichProgressBar):
    """Without a number of epochs, Lightning's bar counts to "-2"; this one shows the epoch alone."""

    def _get_train_description(self, current_epoch: int) -> str:
        if self.trainer.max_epochs == -1:
            return f"Epoch {current_epoch}".ljust(len(self.validation_description))
        return super()._get_train_description(current_epoch)


def progress_bar(refresh_rate: int = 10) -> ProgressBar:
    """Lightning's rich bar on a terminal; plain tqdm lines where output goes to a file or a pipe.

    Args:
        refresh_rate: batches between updates, where output is not a terminal.
    """
    return StepwiseRichProgressBar() if sys.stdout.isatty() else TQDMProgressBar(refresh_rate=refresh_rate)


def console_beside_bar(trainer: L.Trainer) -> Console:
    """The console of a live rich bar, which moves the bar out of the way of what is printed; else a new one."""
    bar = trainer.progress_bar_callback
    if isinstance(bar, RichProgressBar) and bar.progress is not None:
        return bar.progress.console
    return Console()
