"""Measure tokens per second and model FLOPs utilisation (MFU), over a rolling window and over all of training."""

from collections import deque
from time import perf_counter
from typing import Any

import lightning as L
import torch

from lit_fused.losses.loss import labels_of
from lit_fused.models.flops import model_flops, peak_flops
from lit_fused.parallel import placement_of
from lit_fused.training.module import FusedLMModule


class TokenThroughput(L.Callback):
    """Logs, after each optimiser step, throughput/tokens_per_sec, over all ranks, and throughput/mfu, means of the last
    ``window_size``; and throughput/tokens and throughput/seconds, the positions trained on and the time that took, also
    before the run was resumed. Validations do not count. MFU is the achieved part of all devices' peak, if model and
    devices are known (:mod:`lit_fused.models.flops`). The clock is not synchronised with a GPU.

    Attributes:
        mean, mean_mfu: since the end of this fit's first step, which compiles; 0 and None where they are not known.
        tokens: number of positions trained on in this fit, including ignored ones, over all ranks.
    """

    mean, tokens = 0.0, 0
    mean_mfu: float | None = None
    _began = 0.0  # seconds, of a clock that stands still during validations

    def __init__(self, window_size: int = 5) -> None:
        self.window_size = window_size

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._before: dict[str, Any] = {"tokens": 0, "seconds": 0.0}  # of the run that is resumed
        self._model_flops: Any = None
        if isinstance(pl_module, FusedLMModule):
            self._model_flops = model_flops(pl_module.backbone)

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self._before["tokens"] + self.tokens, "seconds": self._before["seconds"] + self._seconds()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = state_dict

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.mean, self.mean_mfu, self.tokens, self._flops = 0.0, None, 0, 0
        peak = peak_flops(trainer.strategy.root_device, str(trainer.precision)) if self._model_flops else None
        self._peak = peak and peak * trainer.world_size  # Tokens and operations are those of all ranks, too.
        self._step = trainer.global_step
        # Seconds, tokens and operations at the end of the first step and of the last ones.
        self._first: tuple[float, int, int] | None = None
        self._last: deque[tuple[float, int, int]] = deque(maxlen=self.window_size + 1)
        self._began = perf_counter()

    def _seconds(self) -> float:
        return perf_counter() - self._began

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._paused = perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._began += perf_counter() - self._paused

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        labels, copies = labels_of(batch), placement_of(trainer.strategy).data_parallel_size
        length = labels.shape[-1]
        self.tokens += labels.numel() * copies
        self._flops += self._model_flops.of(labels.numel() // max(length, 1), length) * copies if self._peak else 0
        if trainer.global_step == self._step:  # The step's other micro-batches are to come.
            return
        self._step = trainer.global_step
        self._last.append((self._seconds(), self.tokens, self._flops))
        logged: dict[str, Any] = self.state_dict()
        if self._first is None:
            self._first = self._last[0]
        else:
            self.mean, self.mean_mfu = self._rates(self._first)
            logged["tokens_per_sec"], mfu = self._rates(self._last[0])
            logged |= {} if mfu is None else {"mfu": mfu}
        for name, value in logged.items():  # A number would wait for the device, to which it is copied.
            shown = name in ("tokens_per_sec", "mfu")
            pl_module.log(f"throughput/{name}", torch.tensor(float(value)), prog_bar=shown, rank_zero_only=True)

    def _rates(self, begin: tuple[float, int, int]) -> tuple[float, float | None]:
        """Return the tokens per second and the MFU between the end of a step and that of the last one."""
        seconds, tokens, flops = (last - first for first, last in zip(begin, self._last[-1], strict=True))
        return tokens / seconds, flops / seconds / self._peak if self._peak else None
