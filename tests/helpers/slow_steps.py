"""A callback that makes each training step last a while, so that a test can interrupt it."""

import time
from typing import Any

import lightning as L


class SlowSteps(L.Callback):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        time.sleep(self.seconds)
