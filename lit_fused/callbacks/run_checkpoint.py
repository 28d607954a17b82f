"""Save the state of a run every n steps and at its end, and print how to resume from it."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from lit_fused.callbacks.training_progress import console_beside_bar
from lit_fused.errors import check_number, resuming
from lit_fused.parallel.checkpoint import newest_checkpoint, wait_for_checkpoints


class RunCheckpoint(Checkpoint):
    """Saves ``last.ckpt`` every n optimiser steps, and with the state with which a fit ends.

    That state is saved before a callback samples or exports in ``on_train_end``. Metrics decide nothing here: for the
    best step, add Lightning's ``ModelCheckpoint`` with a monitored metric.

    Args:
        dirpath: the folder of the checkpoints.
        every_n_train_steps: how many steps a kill costs at most.
        keep_all: also keep each state as ``step-000025.ckpt``.

    Attributes:
        saved_step: the step of ``last.ckpt``; 0 before the first save of this fit.
        last_model_path: the path of ``last.ckpt``; "" before the first save of this fit.
    """

    saved_step, last_model_path = 0, ""
    is_last = False  # A signal has asked the fit to end after the present batch or validation.

    def __init__(self, dirpath: str | Path, every_n_train_steps: int = 25, *, keep_all: bool = False) -> None:
        check_number("every_n_train_steps", every_n_train_steps, "be at least 1", lambda x: x >= 1, whole=True)
        self.folder, self.every_n_train_steps, self.keep_all = Path(dirpath).absolute(), every_n_train_steps, keep_all

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.saved_step, self.last_model_path, self.is_last = 0, "", False

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        is_due = self.is_last or trainer.global_step % self.every_n_train_steps == 0
        if is_due or (trainer.is_last_batch and _has_all_epochs(trainer)) or _has_all_steps(trainer):
            self.save(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.is_last:
            self.save(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # A fit ends with an epoch, which it may have cut short.
        if trainer.should_stop or _has_all_epochs(trainer) or _has_all_steps(trainer):
            self.save(trainer)
            wait_for_checkpoints(trainer.strategy)  # Whatever comes may read it.
            trainer.strategy.barrier("the last checkpoint")

    def save(self, trainer: L.Trainer) -> None:
        """Save the present state, unless that of this step is saved. Every rank calls it."""
        if trainer.fast_dev_run or self.saved_step == trainer.global_step:  # type: ignore[attr-defined]
            return
        self.saved_step, last = trainer.global_step, self.folder / "last.ckpt"
        if self.keep_all:
            trainer.save_checkpoint(self.folder / f"step-{self.saved_step:06d}.ckpt")
        trainer.save_checkpoint(last)
        self.last_model_path = str(last)


def _has_all_steps(trainer: L.Trainer) -> bool:
    return 0 <= trainer.max_steps <= trainer.global_step


def _has_all_epochs(trainer: L.Trainer) -> bool:
    """Return whether the present epoch is the last one."""
    return trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch + 1


class ResumeHint(L.Callback):
    """Prints, after Ctrl-C or an error in training, how to resume by ``command``. Where a resume itself fails, it
    prints nothing: the same command would fail again."""

    def __init__(self, command: Sequence[str] = ("python", "train.py")) -> None:
        self.command = command
        self._has_run = False  # A batch or a validation of this fit has ended.

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._has_run = False

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self._has_run = True

    on_validation_end = on_train_end = on_train_batch_end

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if not trainer.is_global_zero or not trainer.global_step:
            return
        if trainer.ckpt_path and not self._has_run and isinstance(exception, Exception):  # no signal
            return
        last = newest_checkpoint(trainer)
        resume = f". Resume with:\n  {shlex.join(self.command)} {resuming(last)}"
        otherwise = "; no checkpoint was written yet, so start again."
        hint = f"Stopped at step {trainer.global_step}{resume if last else otherwise}"
        console_beside_bar(trainer).print(hint, soft_wrap=True, highlight=False, markup=False)  # one line, easy to copy
