"""The progress bar that fits the terminal."""

import sys

from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar


def progress_bar(refresh_rate: int = 10) -> ProgressBar:
    """Lightning's rich bar on a terminal; plain tqdm lines where output goes to a file or a pipe.

    Args:
        refresh_rate: batches between updates, where output is not a terminal.
    """
    return RichProgressBar(leave=True) if sys.stdout.isatty() else TQDMProgressBar(refresh_rate=refresh_rate)
