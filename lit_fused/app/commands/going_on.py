"""Go on with a run from its checkpoint: its metrics continue, and a run that has been trained to its end is finished.

A run may have been killed after its last checkpoint. Lightning trains nothing then, and calls no hook that exports.
"""

from dataclasses import replace
from pathlib import Path

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from lit_fused.app.reporting.run import forget_end
from lit_fused.app.reporting.sweep import Run, read_run, read_series
from lit_fused.app.run_folder import adopt_configuration
from lit_fused.app.run_metrics import RunCSVLogger
from lit_fused.callbacks.run_checkpoint import RunCheckpoint
from lit_fused.callbacks.training_progress import total_steps


class GoingOn:
    """Takes the place of the ``run`` of a trainer's fit loop, which is called when a checkpoint has been loaded.

    Attributes:
        earlier: a run that was trained already, as its files had it before it was finished.
        first_step: the step that training begins at; infinity before it is known.
    """

    def __init__(self, trainer: L.Trainer, folder: Path) -> None:
        self.earlier: Run | None = None
        self.first_step = float("inf")
        self._trainer, self._folder, self._train = trainer, folder, trainer.fit_loop.run
        trainer.fit_loop.run = self._run  # type: ignore[method-assign]

    def start_at(self, step: int, is_over: bool = False) -> None:
        """Remove from the run's files what comes after a step. Rank zero only."""
        savers = [c for c in self._trainer.checkpoint_callbacks if isinstance(c, RunCheckpoint)]
        last = next((row for row in (saver.unwritten for saver in savers) if row and row["step"] < step), None)
        for logger in self._trainer.loggers:
            if isinstance(logger, RunCSVLogger):
                # Lightning counts steps from 0 here. What is over is validated again.
                logger.keep(lambda row: int(row["step"]) < step - (is_over and bool(row.get("val/loss"))), last)
        if self._trainer.is_global_zero:
            adopt_configuration(self._folder)
            if not is_over:
                forget_end(self._folder)

    def _run(self) -> None:
        trainer, loop = self._trainer, self._trainer.fit_loop
        loop.setup_data()
        step, end = trainer.global_step, total_steps(trainer)
        is_over = 0 < end <= step
        self.start_at(step, is_over)
        if not is_over:
            self.first_step = step
            self._train()
            return
        run = read_run(self._folder)
        last = {name: points[-1][1] for name, points in read_series(run).items()}
        self.earlier = replace(run, metrics=last | run.metrics)
        rank_zero_info(f"Nothing is left to train: the checkpoint is at step {step}, and training ends at step {end}.")
        rank_zero_info("What is left to do is to validate and to export.")
        loop.reset()
        loop.on_run_start()
        trainer.validating = True
        loop.epoch_loop.val_loop.restarting = False
        loop.epoch_loop.val_loop.run()
        trainer.training = True
        loop.on_run_end()
