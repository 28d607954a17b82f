"""Save a run's state so that the newest checkpoint is always that of its last step, and print how to resume from it."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from string import Formatter
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from lit_fused.atomic import is_whole, remove
from lit_fused.callbacks.training_progress import console_beside_bar
from lit_fused.errors import UserError, resuming
from lit_fused.parallel.checkpoint import wait_for_checkpoints

_UNWRITTEN = "lit_fused_unwritten_metrics"  # the key in a checkpoint


class RunCheckpoint(ModelCheckpoint):
    """Lightning's ``ModelCheckpoint``, which also saves the state with which a fit ends, and after it resumed, removes
    what a killed run left of its own files.

    The last step is saved before a callback samples or exports in ``on_train_end``, and so is a step that another
    callback saved (the best by a metric): ``last.ckpt`` is always the newest. No step is saved twice. It takes the
    arguments of ``ModelCheckpoint``; with a monitored metric and without ``save_last`` it saves nothing more.
    """

    unwritten: dict[str, float] | None = None  # The loaded checkpoint's step logged it.
    is_last = False  # The present batch or validation is the last of the fit.

    @property
    def state_key(self) -> str:
        return super().state_key.replace(type(self).__qualname__, ModelCheckpoint.__qualname__, 1)  # reads its states

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.is_last = False
        if stage == "fit" and not trainer.global_step:  # This callback may have been in the fit of another trainer.
            self.unwritten, self._last_global_step_saved = None, 0
        if self.save_last:  # Behind the others, to see what they saved; Lightning goes on with the old list meanwhile.
            others = [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]
            trainer.callbacks = [*others, self]  # type: ignore[attr-defined]

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        # Lightning gives a step's metrics to the loggers after it is saved: a kill in between would lose them.
        connector, stepped = trainer._logger_connector, not trainer.fit_loop._should_accumulate()
        if trainer.training and stepped and connector._first_loop_iter is not None and connector.should_update_logs:
            logged = {name: float(value) for name, value in connector.metrics["log"].items()}
            step = trainer.fit_loop.epoch_loop._batches_that_stepped
            checkpoint[_UNWRITTEN] = {"step": step, "epoch": trainer.current_epoch, **logged}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.unwritten = checkpoint.get(_UNWRITTEN)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        resumed = Path(trainer.ckpt_path or "").absolute()
        if trainer.ckpt_path is None or self.dirpath is None or resumed.parent != Path(self.dirpath):
            return
        if str(resumed) == self.last_model_path:
            self._last_global_step_saved = trainer.global_step
        if self.unwritten is not None:  # Where they were written after all, a report takes these instead.
            step = int(self.unwritten.pop("step"))
            for logger in trainer.loggers:
                logger.log_metrics(self.unwritten, step)
            self.unwritten = None
        if trainer.is_global_zero:
            for path in self._outdated(trainer.global_step):
                if path != resumed:
                    remove(path)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(trainer, *args, **kwargs)
        ends_epoch = trainer.fit_loop.epoch_loop._num_ready_batches_reached()
        ends = 0 <= trainer.max_steps <= trainer.global_step or (ends_epoch and _is_last_epoch(trainer))
        if self.is_last:
            self._save_if_finite(trainer)
        elif ends and self._by_step:  # One that goes by a metric waits for the validation.
            self.save_end(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        others = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c is not self]
        if self.is_last:
            self._save_if_finite(trainer)
            return
        if not any(other.monitor and other._last_global_step_saved == trainer.global_step for other in others):
            return
        if self.save_last and self._last_global_step_saved == trainer.global_step:  # without the new best one's score
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
        self.save_newest(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        if trainer.should_stop or _is_last_epoch(trainer):
            self.save_end(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.save_end(trainer)

    def save_end(self, trainer: L.Trainer) -> None:
        """Save the state with which the fit ends, and wait for it on all ranks: whatever comes may read it."""
        self.save_newest(trainer)
        wait_for_checkpoints(trainer.strategy)
        trainer.strategy.barrier("the last checkpoint")

    def save_newest(self, trainer: L.Trainer) -> None:
        """Save the present state, unless the state of this step is saved; every rank calls it."""
        if not self.is_due(trainer):
            return
        candidates = self._monitor_candidates(trainer)
        if self._by_step:
            self._save_topk_checkpoint(trainer, candidates)
        chosen = self.save_last
        if chosen and not self._by_step:
            self.save_last = True  # there is no file of this step to link to
        self._save_last_checkpoint(trainer, candidates)
        self.save_last = chosen

    def _save_if_finite(self, trainer: L.Trainer) -> None:
        try:
            self.save_end(trainer)
        except UserError as error:  # the run ends by a signal, whose exit code counts
            rank_zero_warn(str(error))

    def is_due(self, trainer: L.Trainer) -> bool:
        """Return whether ``save_newest`` has something to save."""
        return bool(self.save_last or self._by_step) and not self._should_skip_saving_checkpoint(trainer)

    @property
    def _by_step(self) -> bool:
        return self.monitor is None and self.save_top_k != 0

    def _outdated(self, step: int) -> list[Path]:
        """Return the files that were to be removed before ``step``, if ``save_top_k`` removes any."""
        if self.save_top_k == -1 or self.filename is None or self.dirpath is None:
            return []
        pattern = ""
        for text, name, _, _ in Formatter().parse(self.filename):
            pattern += re.escape(text)
            if name:
                key = re.escape(name + self.CHECKPOINT_EQUALS_CHAR) if self.auto_insert_metric_name else ""
                pattern += key + (r"(?P<step>\d+)" if name == "step" else r"[^/]+?")
        if "?P<step>" not in pattern:
            return []
        pattern += rf"({self.CHECKPOINT_JOIN_CHAR}v\d+)?{re.escape(self.FILE_EXTENSION)}"
        newest = [self.best_model_path] if self.monitor is None else list(self.best_k_models)
        names = {Path(path).name for path in newest}
        found = ((path, re.fullmatch(pattern, path.name)) for path in Path(self.dirpath).iterdir())
        return [path for path, match in found if match and int(match["step"]) < step and path.name not in names]


def _is_last_epoch(trainer: L.Trainer) -> bool:
    return trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch + 1


def newest_checkpoint(trainer: L.Trainer) -> str:
    """Return the path of the newest whole checkpoint from which this run can be resumed; "" if there is none."""
    wait_for_checkpoints(trainer.strategy)
    savers = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c._last_global_step_saved]
    savers.sort(key=lambda saver: (saver._last_global_step_saved, bool(saver.save_last)), reverse=True)
    paths = [path for saver in savers for path in (saver.last_model_path, saver.best_model_path)]
    return next((path for path in [*paths, str(trainer.ckpt_path or "")] if path and is_whole(path)), "")


class ResumeHint(L.Callback):
    """Prints, after Ctrl-C or an error in training, how to resume: ``command``, with this run's overrides unless they
    lie beside the checkpoint. Where a resume itself fails it prints nothing: the same command would fail again."""

    def __init__(self, overrides: Sequence[str] = (), command: Sequence[str] = ("python", "train.py")) -> None:
        self.command = list(command)
        self.overrides = [override for override in overrides if not override.startswith("ckpt_path=")]
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
        is_enough = Path(last).absolute().parent.with_name("run.json").is_file()  # It has the overrides.
        words = [*self.command, *([] if is_enough else self.overrides)]
        resume = f". Resume with:\n  {shlex.join(words)} {resuming(last)}"
        otherwise = "; no checkpoint was written yet, so start again."
        hint = f"Stopped at step {trainer.global_step}{resume if last else otherwise}"
        console_beside_bar(trainer).print(hint, soft_wrap=True, highlight=False, markup=False)  # one line, easy to copy
