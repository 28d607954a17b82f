"""Print how to resume an interrupted run."""

import shlex
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import lightning as L

from lit_fused.callbacks.run_checkpoint import newest_checkpoint
from lit_fused.callbacks.training_progress import console_beside_bar


class ResumeHint(L.Callback):
    """Prints, after Ctrl-C or an error in training, the command that resumes from the last whole checkpoint.

    Args:
        overrides: the command-line overrides of this run.
        command: the words that come before them.
    """

    def __init__(self, overrides: Sequence[str] = (), command: Sequence[str] = ("python", "train.py")) -> None:
        self.command = list(command)
        self.enough_in: Path | None = None  # the folder of checkpoints whose configuration lies beside it, if it does
        self.overrides = [override for override in overrides if not override.startswith("ckpt_path=")]

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if not trainer.is_global_zero or not trainer.global_step:
            return
        last = newest_checkpoint(trainer)
        hint = f"Stopped at step {trainer.global_step}; no checkpoint was written yet, so start again."
        if last:
            words = [*self.command, *self.overrides]
            if Path(last).absolute().parent == self.enough_in:
                words = list(takewhile(lambda word: not word.startswith("--"), self.command))
            command = shlex.join([*words, f"ckpt_path={last}"])
            hint = f"Stopped at step {trainer.global_step}. Resume with:\n  {command}"
        console_beside_bar(trainer).print(hint, soft_wrap=True, highlight=False, markup=False)  # one line, easy to copy
