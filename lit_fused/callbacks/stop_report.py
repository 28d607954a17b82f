"""Say what stopped a run before its last step, which of its steps was the best, and which one is exported."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason

from lit_fused.callbacks.export_pretrained import ExportPretrained
from lit_fused.callbacks.training_progress import console_beside_bar, total_steps
from lit_fused.parallel.checkpoint import read_rest

_OTHERS = ("lightning.", "lit_fused.")  # Of their callbacks only EarlyStopping and Timer stop a run.


class Best(NamedTuple):
    metric: str
    value: float
    step: int


class StopReport(L.Callback):
    """Prints one line where a fit was stopped before its last step, or where another step than the last is exported.

    A callback of your own that sets ``trainer.should_stop`` is named if it is the only one of yours.

    Attributes:
        stopped_by: after fit, the class of what stopped it; None if it had all its steps.
        best: after fit, the best value of the metric that a ``ModelCheckpoint`` monitors, and its step; None without.
    """

    stopped_by: str | None = None
    best: Best | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stopped_by = self.best = None
        for callback in _callbacks(trainer):
            if isinstance(callback, EarlyStopping):  # A checkpoint has the reason why it stopped that run.
                callback.stopping_reason, callback.stopping_reason_message = EarlyStoppingReason.NOT_STOPPED, None

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        parts = []
        if trainer.should_stop and trainer.global_step < total_steps(trainer):
            self.stopped_by, why = _stopper(trainer, pl_module)
            parts.append(f"{self.stopped_by} stopped the run at step {trainer.global_step}: {why}")
        savers = [c for c in _callbacks(trainer) if isinstance(c, ModelCheckpoint) and c.monitor]
        for saver in savers:
            score = math.nan if saver.best_model_score is None else float(saver.best_model_score)
            if self.best is None and math.isfinite(score) and Path(saver.best_model_path).exists():
                self.best = Best(str(saver.monitor), score, read_rest(Path(saver.best_model_path))["global_step"])
        exports = [c for c in _callbacks(trainer) if isinstance(c, ExportPretrained) and c.step is not None]
        if not parts and all(export.step == trainer.global_step for export in exports):
            return
        if self.best is not None:
            parts.append(f"best {self.best.metric} {self.best.value:.4g} at step {self.best.step}")
        parts += [f"the weights of step {export.step} are exported to {export.folder}" for export in exports]
        text = "; ".join(parts)
        console_beside_bar(trainer).print(text[:1].upper() + text[1:], soft_wrap=True, highlight=False, markup=False)


def _callbacks(trainer: L.Trainer) -> list[Any]:
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]


def _stopper(trainer: L.Trainer, module: L.LightningModule) -> tuple[str, str]:
    """Return the class of what set ``trainer.should_stop``, and why it did."""
    for callback in _callbacks(trainer):
        if isinstance(callback, EarlyStopping) and callback.stopping_reason is not EarlyStoppingReason.NOT_STOPPED:
            return type(callback).__name__, str(callback.stopping_reason_message).partition(". ")[0]
        left = callback.time_remaining() if isinstance(callback, Timer) else None
        if left is not None and left <= 0:
            return type(callback).__name__, "its time was over"
    own = [o for o in (*_callbacks(trainer), module) if not type(o).__module__.startswith(_OTHERS)]
    return " or ".join(dict.fromkeys(type(o).__name__ for o in own)) or "A callback", "trainer.should_stop was set"
