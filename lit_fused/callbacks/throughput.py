"""Measure tokens per second and model FLOPs utilisation (MFU), over a rolling window and over all of training."""

from time import perf_counter
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.throughput import Throughput

from lit_fused.losses.loss import labels_of
from lit_fused.models.flops import model_flops, peak_flops
from lit_fused.parallel import is_divided, placement_of
from lit_fused.training.module import FusedLMModule


class TokenThroughput(L.Callback):
    """Logs throughput/tokens_per_sec, over all ranks, and throughput/mfu after each optimiser step, means of the last
    ``window_size``; and throughput/tokens and throughput/seconds, the positions trained on and the time that took, also
    before the run was resumed. Validations do not count. MFU is the achieved part of all devices' peak, if model and
    devices are known (:mod:`lit_fused.models.flops`). The clock is not synchronised with a GPU.

    Attributes:
        mean, mean_mfu: since the end of this fit's first step, which compiles; 0 and None where they are not known.
        tokens: number of positions trained on in this fit, including ignored ones, over all ranks.
    """

    mean, tokens = 0.0, 0
    mean_mfu: float | None = None
    _model_flops: Any = None
    _began = _validation = 0.0

    def __init__(self, window_size: int = 5) -> None:
        self.window_size = window_size

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._before: dict[str, Any] = {"tokens": 0, "seconds": 0.0}  # of the run that is resumed
        if isinstance(pl_module, FusedLMModule) and not is_divided(pl_module):
            self._model_flops = model_flops(pl_module.backbone)

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self._before["tokens"] + self.tokens, "seconds": self._before["seconds"] + self._seconds()}

    def _seconds(self) -> float:
        return perf_counter() - self._began - self._validation

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = state_dict

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.mean, self.mean_mfu, self.tokens, self._step = 0.0, None, 0, trainer.global_step
        self._ends: list[tuple[float, int, int]] = []  # (seconds, tokens, operations) at the first and the last step's
        self._flops, self._validation = 0, 0.0
        peak = peak_flops(trainer.strategy.root_device, str(trainer.precision)) if self._model_flops else None
        self._peak = peak and peak * trainer.world_size  # Tokens and operations are those of all ranks, too.
        self._rolling = Throughput(available_flops=self._peak, window_size=max(self.window_size, 2))
        self._began = perf_counter()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._paused = perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validation += perf_counter() - self._paused

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        labels, copies = labels_of(batch), placement_of(trainer.strategy).data_parallel_size
        length = labels.shape[-1]
        self.tokens += labels.numel() * copies
        self._flops += self._model_flops.of(labels.numel() // max(length, 1), length) * copies if self._peak else 0
        if trainer.global_step == self._step:  # The step's other micro-batches are to come.
            return
        self._step, end = trainer.global_step, (self._seconds(), self.tokens, self._flops)
        flops = end[2] - (self._ends[-1][2] if self._ends else 0)
        self._ends = [*self._ends[:1], end]
        self._rolling.update(time=end[0], batches=self._step, samples=self._step, lengths=end[1], flops=flops or None)
        if len(self._ends) > 1:
            seconds, tokens, flops = (last - first for first, last in zip(*self._ends, strict=True))
            self.mean, self.mean_mfu = tokens / seconds, flops / seconds / self._peak if self._peak else None
        rates = self._rolling.compute()
        names = {"tokens_per_sec": "device/items_per_sec", "mfu": "device/mfu"}
        logged = {name: rates[key] for name, key in names.items() if key in rates} | self.state_dict()
        for name, value in logged.items():  # A number would wait for the device, to which it is copied.
            shown = name in names
            pl_module.log(f"throughput/{name}", torch.tensor(float(value)), prog_bar=shown, rank_zero_only=True)
