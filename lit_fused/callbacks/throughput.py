"""Measure tokens per second and model FLOPs utilisation (MFU), over a rolling window and over all of training."""

from time import perf_counter
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.throughput import Throughput

from lit_fused.callbacks.training_progress import TrainingClock
from lit_fused.errors import check_number
from lit_fused.losses.loss import labels_of
from lit_fused.models.flops import ModelFlops, model_flops, peak_flops
from lit_fused.modules.fused_lm import FusedLMModule
from lit_fused.parallel import is_divided, placement_of


class TokenThroughput(TrainingClock):
    """Logs throughput/tokens_per_sec, over all ranks, and throughput/mfu after each optimiser step.

    throughput/tokens and throughput/seconds are all positions trained on and the time since the run began, validation
    included; a run that is resumed goes on counting both. MFU is the achieved part of all devices' peak, if model and
    devices are known (:mod:`lit_fused.models.flops`), in which validation does not count. The clock is not synchronised
    with a GPU, whose queue of work is short compared to the window.

    Args:
        window_size: number of optimiser steps in the rolling average. Nothing is logged before there are as many.

    Attributes:
        mean: tokens per second since the end of the first step, which compiles and warms up; 0 before the second step.
        mean_mfu: MFU over the same time; None if it is unknown.
        tokens: number of positions trained on in this fit, including ignored ones, over all ranks.
    """

    mean, tokens = 0.0, 0
    mean_mfu: float | None = None
    _began: float | None = None
    _tokens_before, _seconds_before = 0, 0.0  # The resumed run had them.

    def __init__(self, window_size: int = 5) -> None:
        check_number("window_size", window_size, "be a number of steps of at least 1", lambda x: x > 0, whole=True)
        self.window_size = window_size
        self._counted: tuple[L.LightningModule, ModelFlops | None] | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._counted is None or self._counted[0] is not pl_module:
            self._counted = pl_module, None
            if isinstance(pl_module, FusedLMModule) and not is_divided(pl_module):  # by an earlier call
                self._counted = pl_module, model_flops(pl_module.backbone)
        if stage == "fit":
            self.tokens, self._began, self._tokens_before, self._seconds_before = 0, None, 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        passed = 0.0 if self._began is None else perf_counter() - self._began
        return {"tokens": self._tokens_before + self.tokens, "seconds": self._seconds_before + passed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._tokens_before, self._seconds_before = int(state_dict["tokens"]), float(state_dict["seconds"])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.mean, self.mean_mfu, self.tokens, self._steps = 0.0, None, 0, 0
        self._began = perf_counter()
        self._flops = self._flops_of_step = 0
        peak = peak_flops(trainer.strategy.root_device, str(trainer.precision))
        self._model_flops = None if self._counted is None or peak is None else self._counted[1]
        self._peak = (peak or 0.0) * trainer.world_size
        # Throughput counts one rank here, because tokens, operations and the peak are those of all ranks.
        # A rate needs the ends of two steps.
        self._rolling = Throughput(available_flops=self._peak, window_size=max(self.window_size, 2))
        self._first_step: tuple[float, int, int] | None = None  # (seconds, tokens, FLOPs) at its end

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        labels = labels_of(batch)
        batches = placement_of(trainer.strategy).data_parallel_size
        self.tokens += labels.numel() * batches
        if self._model_flops is not None:
            length = labels.shape[-1]
            self._flops_of_step += self._model_flops.of(labels.numel() // max(length, 1), length) * batches
        if trainer.fit_loop._should_accumulate():
            return
        seconds = self.training_seconds
        self._steps += 1
        flops, self._flops_of_step = self._flops_of_step, 0
        self._flops += flops
        self._rolling.update(
            time=seconds, batches=self._steps, samples=self._steps, lengths=self.tokens, flops=flops or None
        )
        if self._first_step is None:
            self._first_step = seconds, self.tokens, self._flops
        else:
            elapsed = seconds - self._first_step[0]
            self.mean = (self.tokens - self._first_step[1]) / elapsed
            if self._model_flops is not None:
                self.mean_mfu = (self._flops - self._first_step[2]) / elapsed / self._peak
        rolling = self._rolling.compute()
        for name, measured in (("tokens_per_sec", "device/items_per_sec"), ("mfu", "device/mfu")):
            if measured in rolling:
                pl_module.log(f"throughput/{name}", torch.tensor(rolling[measured]), prog_bar=True, rank_zero_only=True)
        for name, count in self.state_dict().items():  # A number would wait for the device, to which it is copied.
            pl_module.log(f"throughput/{name}", torch.tensor(float(count)), rank_zero_only=True)
