"""Log without waiting for the GPU: learning rates from the CPU, other numbers when they have come by themselves; and
without moving metrics that are where they belong."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from torch import Tensor

from lit_fused.parallel import OnTheWay


class LateRows(L.Callback):
    """Logs each training step's numbers in a row of its own while the next step runs, so that the GPU does not wait;
    the last one when training ends, validates or fails. Numbers on the CPU, and validation's, are logged at once. No
    metric is moved to the device that it is on already."""

    def __init__(self) -> None:
        self._row: tuple[dict[str, Any], list[str], OnTheWay, int] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        connector: Any = trainer._logger_connector
        log: Callable[..., None] = type(connector).log_metrics.__get__(connector)

        def log_late(metrics: Mapping[str, Any], step: int | None = None) -> None:
            self._write(trainer)
            on_device = [name for name, value in metrics.items() if isinstance(value, Tensor) and self._waits(value)]
            if not on_device or step is not None or "step" in metrics or not trainer.training:
                log(metrics, step)
                return
            numbers = torch.stack([metrics[name].detach().double() for name in on_device])
            row = {"epoch": trainer.current_epoch, **metrics}
            step = trainer.fit_loop.epoch_loop._batches_that_stepped
            self._row = row, on_device, OnTheWay(numbers, over_ranks=False), step

        connector.log_metrics = log_late

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        for metric in trainer.fit_loop.epoch_loop._results.values():
            if "to" not in vars(metric):  # It was logged for the first time.
                vars(metric)["to"] = partial(_move, metric)

    def on_train_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        self._write(trainer)
        vars(trainer._logger_connector).pop("log_metrics", None)
        for metric in trainer.fit_loop.epoch_loop._results.values():
            vars(metric).pop("to", None)

    on_exception = on_train_end

    @staticmethod
    def _waits(value: Tensor) -> bool:
        return value.is_cuda

    def _write(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if self._row is None:
            return
        (row, names, numbers, step), self._row = self._row, None
        row |= zip(names, numbers.read(), strict=True)
        row = {name: value.item() if isinstance(value, Tensor) else value for name, value in row.items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics=row, step=step)
            logger.save()

    on_validation_start = on_save_checkpoint = _write


def _move(metric: Any, device: torch.device) -> Any:
    """Move a metric of Lightning to a device, unless it is there. Lightning moves all that a metric has whenever it is
    logged, which takes the host longer than all else that it does with it (of 13 numbers a step 3.4 ms of 4.8)."""
    is_there = isinstance(metric.value, Tensor) and metric.value.device == device
    return metric if is_there else type(metric).to(metric, device)


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
