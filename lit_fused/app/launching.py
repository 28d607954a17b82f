"""A Hydra callback that gives every job of a sweep on one machine GPUs of its own (``hydra/launcher=parallel``)."""

import atexit
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from lit_fused.app.ranks import end_with_parent

_held: list[FileLock] = []  # of this worker, as long as it lives: CUDA's devices cannot be changed once it has started


class OwnGpus(Callback):
    """Lock ``trainer.devices`` of the visible GPUs for the jobs of this process; do nothing without GPUs."""

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
    """Wait until ``count`` of the GPUs are free, and lock them for this process by files in a folder."""
    while True:
        mine = {}
        for gpu in gpus:
            lock = FileLock(folder / gpu.replace("/", "_"))
            with suppress(Timeout):
                lock.acquire(timeout=0)
                mine[gpu] = lock
            if len(mine) == count:
                _held.extend(mine.values())
                return list(mine)
        for lock in mine.values():  # Two workers that each lock a half would wait forever.
            lock.release()
        time.sleep(poll_seconds)


def _visible_gpus(config: DictConfig) -> list[str]:
    if config.trainer.accelerator == "cpu":
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    import torch  # here, so that a wrong sweep is refused before torch is imported

    return [str(index) for index in range(torch.cuda.device_count())]  # this does not start CUDA
