"""A Hydra callback that gives every job of a sweep on one machine GPUs of its own (``hydra/launcher=parallel``), and
ends the jobs with one another and with the process that started them, when all have saved their states.

A worker process locks as many GPUs as its jobs use and keeps them as long as it lives, because once CUDA has started
it cannot change them. Other sweeps of the same user on the machine wait for the locks.
"""

import atexit
import os
import shutil
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from lit_fused.app.ranks import SideBySide

_held: list[FileLock] = []  # the locks of this process


class OwnGpus(Callback):
    """Lock ``trainer.devices`` GPUs for the jobs of this process; do nothing on a machine without GPUs."""

    _jobs: SideBySide | None = None  # workers get a copy of this object

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(tempfile.mkdtemp(prefix="lit-fused-sweep-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self._jobs = SideBySide(folder)
        self._jobs.listen()
        gpus, devices, jobs = _visible_gpus(config), config.trainer.devices, config.hydra.launcher.n_jobs
        if not gpus:
            return
        # Hydra turns an Exception of a callback into a warning; SystemExit is no Exception.
        if not isinstance(devices, int) or devices < 1:
            raise SystemExit(f"hydra/launcher=parallel needs a number of GPUs for a job, got trainer.devices={devices}")
        if not 1 <= jobs <= len(gpus) // devices:
            raise SystemExit(
                f"hydra.launcher.n_jobs={jobs} jobs at a time with trainer.devices={devices} do not fit on "
                f"{len(gpus)} GPUs; choose hydra.launcher.n_jobs={len(gpus) // devices or 1}"
            )

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        if self._jobs is not None:
            self._jobs.begin()
        gpus = _visible_gpus(config)
        if gpus and not _held:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(claim(gpus, config.trainer.devices))


def claim(gpus: list[str], count: int, poll_seconds: float = 2.0) -> list[str]:
    """Wait until ``count`` of the GPUs are free, and lock them for this process."""
    folder = _lock_folder()
    while True:
        mine = {}
        for gpu in gpus:
            lock = FileLock(folder / f"gpu-{gpu.replace('/', '_')}.lock")
            with suppress(Timeout):
                lock.acquire(timeout=0)
                mine[gpu] = lock
            if len(mine) == count:
                _held.extend(mine.values())
                return list(mine)
        for lock in mine.values():  # two sweeps that each lock a half would wait forever
            lock.release()
        time.sleep(poll_seconds)


def _lock_folder() -> Path:
    """Return a folder of this machine that no other user can write to."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "lit_fused" / "locks" / socket.gethostname()  # a home folder may be that of several machines
    if runtime and os.access(runtime, os.W_OK):
        folder = Path(runtime, "lit_fused")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise SystemExit(f"{folder}, where GPUs are locked, is a link or another user's; remove it")
    folder.chmod(0o700)
    return folder


def _visible_gpus(config: DictConfig) -> list[str]:
    if config.trainer.accelerator == "cpu":
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    import torch  # here, so that a wrong sweep is refused before torch is imported

    return [str(index) for index in range(torch.cuda.device_count())]  # this does not start CUDA
