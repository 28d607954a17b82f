"""End a fit in an orderly way when Ctrl-C, SIGTERM, a terminal that closes or a cluster's scheduler asks for it."""

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
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn

from lit_fused.callbacks.run_checkpoint import RunCheckpoint
from lit_fused.errors import Stopped, resuming
from lit_fused.parallel import HostCopy
from lit_fused.parallel.checkpoint import newest_checkpoint, wait_for_checkpoints

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_REQUEUES = [getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)]
_SAME_S = 1.0  # two signals within this time are one: torchrun passes on the Ctrl-C that its terminal sent as well


class StopOnSignal(L.Callback):
    """Ends a fit after the present batch or validation when SIGINT (Ctrl-C), SIGTERM or SIGHUP (a terminal or an ssh
    connection that closes) comes to any of its ranks. A signal that the process ignores, as under nohup, stays ignored.

    The ranks agree on a batch, ``RunCheckpoint`` saves its state, and each raises :class:`~lit_fused.errors.Stopped`,
    whose exit code is 130, 143 or 129. A second Ctrl-C, more than a second later, and any signal before the first batch
    and after the last, stops at once: no half of an optimiser step is ever saved.

    Under SLURM, and in jobs of submitit, SIGUSR1 and SIGUSR2 end it in the same way, and the job is put into the queue
    again: by submitit's own handler or, if Lightning's ``SLURMEnvironment`` has ``auto_requeue``, by ``scontrol``.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}  # handlers
        self._trainer: Any = None  # of the fit that runs

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._trainer, self._process, self._in_steps = trainer, os.getpid(), False
        self._asked = self._agreed = 0  # the number of the signal that came to this rank; of one that all ranks know of
        self._unread: HostCopy | None = None  # the largest signal that had come to any rank at the end of a batch
        self._environment = getattr(trainer.strategy, "cluster_environment", None)
        is_job = isinstance(self._environment, SLURMEnvironment)
        requeues = [number for number in _REQUEUES if is_job or callable(signal.getsignal(number))]
        handlers = {number: signal.getsignal(number) for number in (*_SIGNALS, *requeues)}
        self._previous |= {n: h for n, h in handlers.items() if h not in (self._handle, signal.SIG_IGN)}
        self._terminals = [stream for stream in (1, 2) if os.isatty(stream)]
        self._listen()  # already here: workers that load data are forked before training starts, and inherit it

    def on_sanity_check_start(self, *_: Any, **__: Any) -> None:
        self._listen()  # Lightning has installed its own handler, which sends a broadcast, in between.

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._listen()
        # Lightning asks all ranks before each batch whether its handler was called, and each device waits for the
        # answer. It has no setting for that, and its handler is replaced.
        vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = lambda: None
        self._in_steps = True

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        if self._agreed:  # on all ranks, which name the checkpoint that the first one puts in place
            wait_for_checkpoints(self._trainer.strategy)
            self._trainer.strategy.barrier("the last checkpoint")
            self._stop()

    on_train_epoch_end = on_validation_start = on_train_batch_start

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self._agree(at_once=False)

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        # Several ranks may have different numbers of batches. A step that is not saved is saved after the validation.
        is_saved = all(saver.saved_step == trainer.global_step for saver in self._savers())
        if self._asked and self._in_steps and trainer.world_size == 1 and is_saved:
            self._stop()

    def on_validation_end(self, *_: Any, **__: Any) -> None:
        if self._in_steps:
            self._agree()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._in_steps = False
        self._agree()
        self.on_train_batch_start()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._in_steps = False
        if not isinstance(exception, Stopped):  # After that, another signal must not disturb the end of the process.
            self.teardown(trainer)

    def teardown(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        vars(trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)
        self._trainer = None  # Lightning installs this handler once more: it gives its place back when it is called.

    def _savers(self) -> list[RunCheckpoint]:
        return [c for c in self._trainer.checkpoint_callbacks if isinstance(c, RunCheckpoint)]

    def _agree(self, *, at_once: bool = True) -> None:
        """Learn if any rank was asked to stop; all call it. Unless ``at_once`` it is a batch late: no device waits."""
        self._agreed = self._asked
        if self._trainer.world_size > 1:
            before = self._unread
            self._unread = HostCopy(torch.full((1,), self._asked, device=self._trainer.strategy.root_device))
            read = self._unread if at_once else before
            self._agreed = read.read()[0] if read is not None else 0
            self._asked = max(self._asked, self._agreed)
        for saver in self._savers() if self._agreed else ():
            saver.is_last = True

    def _listen(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in self._previous:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_worker = self._trainer is not None and os.getpid() != self._process
        if is_worker and number != signal.SIGTERM:  # It ends with the process that it loads data for.
            return
        if is_worker or self._trainer is None:
            signal.signal(number, signal.SIG_DFL if is_worker else self._previous[number])
            return signal.raise_signal(number)
        again = bool(self._asked) and number == signal.SIGINT and time.monotonic() - self._asked_at > _SAME_S
        if self._asked and not again:
            return
        self._asked, self._asked_at = number, time.monotonic()
        if again or not self._in_steps:
            if hasattr(self._trainer.strategy.launcher, "kill"):
                self._trainer.strategy.launcher.kill(number)
            self._stop()
        if number == getattr(signal, "SIGHUP", None):  # The terminal is gone: printing to it would be an error.
            for stream in self._terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        if self._trainer.is_global_zero:
            name, when = signal.Signals(number).name, "this" if self._trainer.world_size == 1 else "the next"
            os.write(2, f"\n{name}: the run stops after {when} step. Ctrl-C, once more, stops it at once.\n".encode())

    def _stop(self) -> NoReturn:
        trainer: L.Trainer = self._trainer
        if trainer.local_rank > 0 and isinstance(self._environment, LightningEnvironment):
            atexit.register(_wait_for_end_of, os.getppid())
        where = ""
        if trainer.state.fn == TrainerFn.FITTING:
            newest = newest_checkpoint(trainer)
            resume = f"resume with {resuming(newest)}" if newest else "no checkpoint was written, so start again"
            where = f" at step {trainer.global_step}; {resume}"
        number = self._agreed or self._asked
        if number in _REQUEUES:
            self._requeue(number)
        raise Stopped(number, where)

    def _requeue(self, number: int) -> None:
        handler = self._previous.get(number)
        if callable(handler):  # submitit's, which ends the process of the first rank
            handler(number, None)
        elif getattr(self._environment, "auto_requeue", False) and self._trainer.is_global_zero:
            array, job = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ["SLURM_JOB_ID"]
            task = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else job
            subprocess.run(["scontrol", "requeue", task], check=True)


def _wait_for_end_of(parent: int, longest_s: float = 30.0) -> None:
    """Outlive the process that started this one: Lightning kills it, amid its last words, when this one ends first."""
    end = time.monotonic() + longest_s
    while os.getppid() == parent and time.monotonic() < end:
        time.sleep(0.05)
