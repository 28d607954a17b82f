"""Tokens per second, over a rolling window for the progress bar and over the whole of training for the report.

Time spent in validation is not counted. On a GPU the clock is not synchronised with the device: the queue of work is
short against the window.

Logged: throughput/tokens_per_sec, over all ranks.
"""

from time import perf_counter
from typing import Any

import lightning as L
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch.trainer.states import TrainerFn

from lit_fused.losses.base import labels_of
from lit_fused.parallel import data_parallel_size


class TokenThroughput(L.Callback):
    """Logs tokens per second after each optimiser step.

    Args:
        window_size: number of optimiser steps that the logged average spans; nothing is logged before.

    Attributes:
        mean: tokens per second since the end of the first step, which compiles and warms up; 0 before the second.
        tokens: positions trained on so far in this fit, ignored ones included, over all ranks.
    """

    def __init__(self, window_size: int = 5) -> None:
        self.window_size = window_size
        self.mean = 0.0
        self.tokens = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.mean, self.tokens, self._steps = 0.0, 0, 0
        self._rolling = Throughput(window_size=self.window_size)
        self._start = perf_counter()
        self._first_step: tuple[float, int] | None = None  # (seconds, tokens) at its end

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validation_start = perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._start += perf_counter() - self._validation_start

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.tokens += labels_of(batch).numel() * data_parallel_size(trainer.strategy)
        if trainer.fit_loop._should_accumulate():
            return
        seconds = perf_counter() - self._start
        self._steps += 1
        self._rolling.update(time=seconds, batches=self._steps, samples=self._steps, lengths=self.tokens)
        if self._first_step is None:
            self._first_step = seconds, self.tokens
        else:
            self.mean = (self.tokens - self._first_step[1]) / (seconds - self._first_step[0])
        now = self._rolling.compute().get(
            "device/items_per_sec"
        )  # of a world of one: tokens are counted over all ranks
        if now is not None:
            pl_module.log("throughput/tokens_per_sec", now, prog_bar=True, rank_zero_only=True)
