"""End a fit in an orderly way when Ctrl-C or SIGTERM asks for it."""

import atexit
import os
import signal
import subprocess
import threading
import time
from types import FrameType
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn

from lit_fused.callbacks.run_checkpoint import RunCheckpoint, newest_checkpoint
from lit_fused.checkpoints.whole_or_not import resuming
from lit_fused.errors import Stopped
from lit_fused.parallel import OnTheWay

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME_S = 1.0  # two of the same signal within this time are one
_LAST_WORDS_S = 30.0  # Processes of Lightning's launcher have so long.


class StopOnSignal(L.Callback):
    """Ends a fit after the present batch or validation when SIGINT (Ctrl-C) or SIGTERM comes. Of several ranks any
    one may get it; the fit then ends after the next batch.

    All ranks agree on the batch, ``RunCheckpoint`` saves its state, and every rank raises
    :class:`~lit_fused.errors.Stopped`, whose exit code is 130 or 143. A second Ctrl-C, more than a second later, and
    any signal before the first batch and after the last, stops at once: no half of an optimiser step is ever saved.
    Lightning's own handlers end with 0 or 1, and that of SIGTERM broadcasts among the collectives of a step. Its
    question to all ranks before each batch, for which every device is waited for, is not asked.
    """

    def __init__(self) -> None:
        self._asked = self._agreed = 0  # the number of the signal that came to this rank, to any rank
        self._since = float("-inf")  # when this rank was asked
        self._orderly = self._ended = False
        self._previous: dict[int, Any] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._asked = self._agreed = 0
        self._unread: OnTheWay | None = None  # the largest signal that had come to any rank a batch ago
        self._orderly = self._ended = False
        self._trainer, self._process = trainer, os.getpid()
        self._previous = {number: signal.getsignal(number) for number in _SIGNALS}
        self._listen()  # already here: workers that load data are forked before training starts, and inherit it

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._listen()  # Lightning has put its own there meanwhile
        # Lightning has no setting for it. Its SIGTERM handler, the only one whose news it brings, is replaced above.
        vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = lambda: None
        self._orderly = True

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        if self._agreed:
            self._stop()

    on_train_epoch_end = on_train_batch_start

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self._agree(at_once=False)

    def on_validation_start(self, *_: Any, **__: Any) -> None:
        if self._agreed:
            self._stop()
        if not self._orderly:
            self._listen()

    on_test_start = on_predict_start = on_validation_start

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        # Ranks may validate with different numbers of batches. They agree when all have ended.
        due = any(saver.is_due(trainer) for saver in self._savers())
        if self._asked and self._orderly and trainer.world_size == 1 and not due:
            self._stop()

    def on_validation_end(self, *_: Any, **__: Any) -> None:
        if self._orderly:
            self._agree()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._orderly = False
        self._agree()
        if self._agreed:
            self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._orderly = False
        if not self._ended:
            self._forget(trainer)

    def _savers(self) -> list[RunCheckpoint]:
        return [c for c in self._trainer.checkpoint_callbacks if isinstance(c, RunCheckpoint)]

    def _agree(self, *, at_once: bool = True) -> None:
        """Learn if any rank was asked to stop; all call it. Unless ``at_once`` it is a batch late: no device waits."""
        self._agreed = self._asked
        if self._trainer.world_size > 1:
            before = self._unread
            self._unread = OnTheWay(torch.full((1,), self._asked, device=self._trainer.strategy.root_device))
            read = self._unread if at_once else before
            self._agreed = read.read()[0] if read is not None else 0
            self._asked = max(self._asked, self._agreed)
        for saver in self._savers() if self._agreed else ():
            saver.is_last = True

    def _listen(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                signal.signal(number, self._handle)

    def _forget(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        vars(trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            trainer._signal_connector._original_handlers.update(self._previous)  # it restores them later

    teardown = _forget

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker, which ends with this process
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        # torchrun passes on the Ctrl-C that its terminal has sent here already.
        again = bool(self._asked) and number == signal.SIGINT and time.monotonic() - self._since > _SAME_S
        if self._asked and not again:
            return
        self._asked, self._since = number, time.monotonic()
        if again or not self._orderly:
            launcher = self._trainer.strategy.launcher
            if launcher is not None and hasattr(launcher, "kill"):
                launcher.kill(number)
            self._agreed = number
            self._stop()
        if self._trainer.is_global_zero:
            name, when = signal.Signals(number).name, "this" if self._trainer.world_size == 1 else "the next"
            os.write(2, f"\n{name}: the run stops after {when} step. Ctrl-C, once more, stops it at once.\n".encode())

    def _stop(self) -> NoReturn:
        trainer, self._ended = self._trainer, True
        for thread in threading.enumerate():  # Lightning's, which kills this process when another one has ended first
            if thread.name == "child-process-observer":
                vars(thread)["_child_processes"] = []
        atexit.register(_wait_for, getattr(trainer.strategy.launcher, "procs", []))
        where = ""
        if trainer.state.fn == TrainerFn.FITTING:
            newest = newest_checkpoint(trainer)
            resume = f"resume with {resuming(newest)}" if newest else "no checkpoint was written, so start again"
            where = f" at step {trainer.global_step}; {resume}"
        raise Stopped(self._agreed or self._asked, where)


def _wait_for(processes: list[Any]) -> None:
    for process in processes:
        try:
            process.wait(_LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            process.kill()
