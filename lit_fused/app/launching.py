"""Hydra callbacks of sweeps: one shows the report, and one gives the jobs that run side by side GPUs of their own."""

import atexit
import os
import shutil
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from lit_fused.app.ranks import end_with_parent
from lit_fused.app.reporting.page import write_report

_PAUSE = 20  # times as long as a report takes
_held: list[ExitStack] = []  # a worker's locks, as long as it lives: CUDA has its devices from its start


class SweepReport(Callback):
    """Writes the report into a sweep's folder while its jobs run, and shows it at the end. A run that goes on in its
    folder of a sweep renews it."""

    _next = 0.0  # the earliest time of the next report; of the class, because each parallel job has a copy of this

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        # Hydra calls on_multirun_end neither after a job that failed nor after Ctrl-C.
        atexit.register(_show, Path(config.hydra.runtime.cwd, config.hydra.sweep.dir))

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        start, hydra = time.monotonic(), config.hydra
        if hydra.mode == RunMode.MULTIRUN and start >= SweepReport._next:
            write_report(Path(hydra.runtime.cwd, hydra.sweep.dir))
            SweepReport._next = start + _PAUSE * (time.monotonic() - start)
        elif hydra.mode == RunMode.RUN and Path(hydra.runtime.output_dir, "../multirun.yaml").is_file():
            write_report(Path(hydra.runtime.output_dir).parent)


def _show(sweep: Path) -> None:
    with suppress(KeyboardInterrupt):  # Another Ctrl-C: files that are not written stay as they were.
        if text := write_report(sweep):
            print(f"\n{text}\n\nreport  {sweep / 'report.html'}", flush=True)


class OwnGpus(Callback):
    """Locks ``trainer.devices`` of the visible GPUs for the jobs of this process (``hydra/launcher=parallel``)."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._launcher, self._locks = os.getpid(), Path(tempfile.mkdtemp(prefix="lit-fused-gpus-"))  # Workers get both.
        atexit.register(shutil.rmtree, self._locks, ignore_errors=True)
        gpus, devices, jobs = _visible_gpus(config), config.trainer.devices, config.hydra.launcher.n_jobs
        # Hydra turns an Exception of a callback into a warning; SystemExit is no Exception.
        if gpus and not isinstance(devices, int):
            raise SystemExit(f"hydra/launcher=parallel needs a number of GPUs for a job, got trainer.devices={devices}")
        if gpus and not 1 <= jobs <= len(gpus) // devices:
            raise SystemExit(
                f"hydra.launcher.n_jobs={jobs} jobs at a time with trainer.devices={devices} do not fit on "
                f"{len(gpus)} GPUs; choose hydra.launcher.n_jobs={len(gpus) // devices or 1}"
            )

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        if os.getpid() != self._launcher:
            end_with_parent()
        gpus = _visible_gpus(config)
        if gpus and not _held:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(claim(self._locks, gpus, config.trainer.devices))


def claim(folder: Path, gpus: list[str], count: int, poll_seconds: float = 1.0) -> list[str]:
    """Wait for ``count`` neighbouring GPUs that no other process has, and lock each by a file in a folder."""
    groups = [gpus[first : first + count] for first in range(0, len(gpus) - count + 1, count)]
    while True:
        for group in groups:
            with suppress(Timeout), ExitStack() as locks:  # It frees a part of a group that another job has.
                for gpu in group:
                    locks.enter_context(FileLock(folder / gpu.replace("/", "_")).acquire(timeout=0))
                _held.append(locks.pop_all())
                return group
        time.sleep(poll_seconds)


def _visible_gpus(config: DictConfig) -> list[str]:
    if config.trainer.accelerator == "cpu":
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        import torch  # here, so that a wrong sweep is refused before torch is imported

        return [str(index) for index in range(torch.cuda.device_count())]  # this does not start CUDA
    return [name.strip() for name in visible.split(",") if name.strip()]
