"""Log learning rates in the row of their step."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor


class LearningRate(LearningRateMonitor):
    """Logs learning rates under Lightning's names in the step's row; its own monitor waits for a GPU to copy them."""

    def __init__(self) -> None:
        super().__init__(logging_interval="step")

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any) -> None:
        scheduled = [config.scheduler.optimizer for config in trainer.lr_scheduler_configs]
        optimizers = {id(optimizer): optimizer for optimizer in [*scheduled, *trainer.optimizers]}
        rates = [group["lr"] for optimizer in optimizers.values() for group in optimizer.param_groups]
        for name, rate in zip(self.lrs, rates, strict=False):
            pl_module.log(name, torch.tensor(float(rate), dtype=torch.float64))
