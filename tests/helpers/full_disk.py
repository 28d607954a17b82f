"""A callback for runs in processes of their own: from some moment on, files cannot be written."""

import os
import resource
import shutil
from pathlib import Path
from typing import Any

import lightning as L


class FullDisk(L.Callback):
    """Lets files grow no larger than ``size`` bytes (EFBIG, as a quota does), or replaces ``path``.

    Args:
        hook: the hook of Lightning's in which that happens.
        step: the optimiser step from which on.
        size: of the largest file.
        path: becomes a link to the device that is always full; a folder is removed.
    """

    def __init__(self, hook: str, step: int = 0, size: int = 0, path: str = "") -> None:
        def act(trainer: L.Trainer, *_: Any, **__: Any) -> None:
            if trainer.global_step < step:
                return
            if size:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            elif Path(path).is_dir():
                shutil.rmtree(path)
            elif not Path(path).is_symlink():
                Path(path).unlink(missing_ok=True)
                os.symlink("/dev/full", path)

        setattr(self, hook, act)
