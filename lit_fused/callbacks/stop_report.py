"""Say what stopped a run before its last step, which of its steps was the best, and which one is exported."""

import math
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from torch import Tensor

from lit_fused.callbacks.export_pretrained import ExportPretrained
from lit_fused.callbacks.training_progress import console_beside_bar, total_steps
from lit_fused.checkpoints.reading import step_of

_C = TypeVar("_C")
_OTHERS = ("lightning.", "lit_fused.")  # Of their callbacks only EarlyStopping and Timer stop a run.


class Best(NamedTuple):
    metric: str
    value: float
    step: int | None  # None where it is that of a run before this one resumed it, and no checkpoint has it


class StopReport(L.Callback):
    """Prints one line where a fit was stopped before its last step, or where another step than the last is exported.

    A callback of your own that sets ``trainer.should_stop`` is named if it is the only one of yours.

    Attributes:
        stopped_by: after fit, the class of what stopped it; None if it had all its steps.
        best: after fit, the best value of the metric that a callback monitors, and its step; None without one.
    """

    def __init__(self) -> None:
        self.stopped_by: str | None = None
        self.best: Best | None = None
        self._scores: dict[str, tuple[Tensor, int | None]] = {}  # of each EarlyStopping, with its step

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stopped_by, self.best = None, None
        self._scores = {stopping.state_key: (stopping.best_score, None) for stopping in _of(trainer, EarlyStopping)}
        for stopping in _of(trainer, EarlyStopping):  # A checkpoint has the reason why it stopped that run.
            stopping.stopping_reason, stopping.stopping_reason_message = EarlyStoppingReason.NOT_STOPPED, None

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        for stopping in _of(trainer, EarlyStopping):
            if self._scores[stopping.state_key][0] is not stopping.best_score:
                self._scores[stopping.state_key] = stopping.best_score, trainer.global_step

    on_train_end = on_train_batch_start

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        stopping, why = None, ""
        if trainer.should_stop and trainer.global_step < total_steps(trainer):
            stopping = next((c for c in _of(trainer, EarlyStopping) if _has_stopped(c)), None)
            self.stopped_by, why = _stopper(trainer, pl_module, stopping)
        self.best = self._best(trainer, stopping)
        exports = [export for export in _of(trainer, ExportPretrained) if export.step is not None]
        if not self.stopped_by and all(export.step == trainer.global_step for export in exports):
            return
        text = f"{self.stopped_by} stopped the run at step {trainer.global_step}: {why}" if self.stopped_by else ""
        places = {export.step: export.folder for export in exports}
        if self.best is not None:
            at = " before it was resumed" if self.best.step is None else f" at step {self.best.step}"
            text += f"; best {'' if stopping else self.best.metric + ' '}{self.best.value:.4g}{at}"
            if self.best.step in places:
                text += f", which is exported to {places.pop(self.best.step)}"
        text += "".join(f"; the weights of step {step} are exported to {folder}" for step, folder in places.items())
        text = text.removeprefix("; ")
        console_beside_bar(trainer).print(text[:1].upper() + text[1:], soft_wrap=True, highlight=False, markup=False)

    def _best(self, trainer: L.Trainer, stopping: EarlyStopping | None) -> Best | None:
        savers = [c for c in _of(trainer, ModelCheckpoint) if c.monitor and c.best_model_score is not None]
        stoppings = [stopping] if stopping else _of(trainer, EarlyStopping)
        if stopping is not None:
            savers = [c for c in savers if c.monitor == stopping.monitor]
        best = None
        for saver in savers:
            path, score = saver.best_model_path, float(saver.best_model_score)  # type: ignore[arg-type]
            if best is None and path and Path(path).exists() and math.isfinite(score):
                best = Best(str(saver.monitor), score, step_of(Path(path)))
        for candidate in stoppings:
            score, step = self._scores[candidate.state_key]
            # A ModelCheckpoint knows nothing of a run that is resumed in another folder, and an EarlyStopping does.
            is_better = best is None or (
                candidate.monitor == best.metric and bool(candidate.monitor_op(score.cpu(), torch.tensor(best.value)))
            )
            if is_better and math.isfinite(score):
                best = Best(candidate.monitor, float(score), step)
        return best


def _of(trainer: L.Trainer, kind: type[_C]) -> list[_C]:
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    return [callback for callback in callbacks if isinstance(callback, kind)]


def _has_stopped(stopping: EarlyStopping) -> bool:
    return stopping.stopping_reason is not EarlyStoppingReason.NOT_STOPPED


def _stopper(trainer: L.Trainer, module: L.LightningModule, stopping: EarlyStopping | None) -> tuple[str, str]:
    """Return the class of what set ``trainer.should_stop``, and why it did."""
    if stopping is not None:
        name, metric = type(stopping).__name__, stopping.monitor
        checks = f"{stopping.wait_count} {'validation' if metric.startswith('val') else 'check'}"
        checks += "s" if stopping.wait_count > 1 else ""
        why = {
            EarlyStoppingReason.PATIENCE_EXHAUSTED: f"{metric} did not improve for {checks}",
            EarlyStoppingReason.STOPPING_THRESHOLD: f"{metric} passed stopping_threshold={stopping.stopping_threshold}",
            EarlyStoppingReason.DIVERGENCE_THRESHOLD: (
                f"{metric} passed divergence_threshold={stopping.divergence_threshold}"
            ),
            EarlyStoppingReason.NON_FINITE_METRIC: f"{metric} was not finite",
        }
        return name, why[stopping.stopping_reason]
    for timer in _of(trainer, Timer):
        left = timer.time_remaining()
        if left is not None and left <= 0:
            return type(timer).__name__, "its time was over"
    own = [o for o in (*_of(trainer, L.Callback), module) if not type(o).__module__.startswith(_OTHERS)]
    names = dict.fromkeys(type(o).__name__ for o in own)
    return " or ".join(names) or "A callback", "trainer.should_stop was set"
