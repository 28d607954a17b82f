"""A callback for runs in processes of their own: from some step on, files cannot be written."""

import resource
from typing import Any

import lightning as L


class FullDisk(L.Callback):
    """Lets files grow no larger than ``size`` bytes (EFBIG, as a quota does)."""

    def __init__(self, step: int, size: int) -> None:
        self.step, self.size = step, size

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step >= self.step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.RLIM_INFINITY))
