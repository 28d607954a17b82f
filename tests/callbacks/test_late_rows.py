"""Rows of training that come late: the same rows, with the same steps, whatever happens meanwhile."""

import csv
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama

from lit_fused import FusedCausalLMModule
from lit_fused.callbacks import LateRows


class OfEveryDevice(LateRows):
    """Takes a CPU's numbers for those of a GPU."""

    @staticmethod
    def _waits(value: torch.Tensor) -> bool:
        return True


class Failing(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            raise RuntimeError("as a test wants it")


def rows_of(folder: Path, *callbacks: L.Callback, **options: Any) -> list[dict[str, str]]:
    logger = CSVLogger(folder, name="", version="")
    settings: dict[str, Any] = {"max_steps": 6, "val_check_interval": 3, "log_every_n_steps": 1} | options
    trainer = quiet_trainer(folder, logger=logger, callbacks=list(callbacks), **settings)
    module = FusedCausalLMModule(tiny_llama())
    fails = any(isinstance(callback, Failing) for callback in callbacks)
    with pytest.raises(RuntimeError, match="as a test wants it") if fails else nullcontext():
        trainer.fit(module, loader(ragged_batches(6)), loader(ragged_batches(1)))
    assert "log_metrics" not in vars(trainer._logger_connector)
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("options", [{}, {"log_every_n_steps": 2}, {"accumulate_grad_batches": 2, "max_steps": 3}])
def test_late_rows_are_those_that_are_logged_at_once(options, tmp_path):
    assert rows_of(tmp_path / "late", OfEveryDevice(), **options) == rows_of(tmp_path / "at_once", **options)


def test_a_metric_is_moved_when_it_is_logged_first_and_when_the_trainer_ends(tmp_path, monkeypatch):
    moved: Counter[str] = Counter()
    own = _ResultMetric.to

    def counted(self: Any, *device: Any) -> Any:
        moved[self.meta.name] += 1
        return own(self, *device)

    monkeypatch.setattr(_ResultMetric, "to", counted)
    rows_of(tmp_path / "at_once", val_check_interval=None)
    assert moved["train/loss"] == 6 + 1  # in each step, and when the trainer ends
    moved.clear()
    rows_of(tmp_path / "late", LateRows(), val_check_interval=None)
    assert set(moved.values()) == {1 + 1}


def test_the_last_row_before_an_error_is_written(tmp_path):
    rows = rows_of(tmp_path, OfEveryDevice(), Failing())
    assert [row["step"] for row in rows if row["train/loss"]] == ["0", "1", "2"]


def test_a_row_is_written_while_the_next_step_runs(tmp_path):
    seen: list[int] = []

    class Count(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
            file = tmp_path / "metrics.csv"
            seen.append(len(file.read_text().splitlines()) if file.exists() else 0)

    rows_of(tmp_path, OfEveryDevice(), Count(), max_steps=3, val_check_interval=None)
    assert seen == [0, 0, 2]  # names, and the row of the first step
