"""The end of a run says what stopped it, and the card beside exported weights tells of these weights."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama

from lit_fused import FusedCausalLMModule
from lit_fused.callbacks import ExportPretrained, RunCheckpoint, StopReport, WeightAverage


class Scores(FusedCausalLMModule):
    """Its validations measure these values, one after the other, beside the loss."""

    values = (3.0, 2.0, 1.5, 2.5, 2.6, 2.7)

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.log("val/score", self.values[self.trainer.global_step // 2 - 1])


class Improving(Scores):
    values = (3.0, 2.0, 1.0, 0.5, 0.4, 0.3)


def fit(folder: Path, *callbacks: L.Callback, kind: Any = Scores, ckpt_path: Any = None, **options: Any) -> StopReport:
    report = StopReport()
    settings = {"max_steps": 12, "val_check_interval": 2, "check_val_every_n_epoch": None} | options
    trainer = quiet_trainer(folder, callbacks=[report, *callbacks], enable_checkpointing=True, **settings)
    trainer.fit(kind(tiny_llama()), loader(ragged_batches(4)), loader(ragged_batches(2)), ckpt_path=ckpt_path)
    return report


def saver(folder: Path, mode: Any = "min") -> ModelCheckpoint:
    return ModelCheckpoint(folder, "best-{step}", monitor="val/score", mode=mode, save_on_train_epoch_end=False)


def card(folder: Path) -> dict[str, str]:
    rows = [line.strip("| ").split(" | ") for line in (folder / "README.md").read_text().splitlines() if "| " in line]
    return {row[0]: row[1] for row in rows if len(row) == 2}


def test_early_stopping_is_named_with_the_best_value_its_step_and_what_is_exported(tmp_path, capsys):
    losses: dict[int, float] = {}

    class Losses(L.Callback):
        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            losses[trainer.global_step] = float(trainer.callback_metrics["val/loss"])

    stopping, out = EarlyStopping("val/score", patience=2), tmp_path / "out"
    report = fit(tmp_path, stopping, Losses(), saver(tmp_path), ExportPretrained(out, which="best"))
    assert (
        "EarlyStopping stopped the run at step 10: Monitored metric val/score did not improve in the last 2 records; "
        f"best val/score 1.5 at step 6; the weights of step 6 are exported to {out}\n"
    ) in capsys.readouterr().out
    assert report.stopped_by == "EarlyStopping"
    assert report.best == ("val/score", 1.5, 6)
    assert card(out)["trained for"] == "6 optimizer steps of 10"
    assert card(out)["val/score"] == "1.5"
    assert card(out)["val/loss"] == f"{losses[6]:.4g}" != f"{losses[10]:.4g}"


def test_nothing_is_said_of_a_run_that_has_all_its_steps_and_ends_with_the_best(tmp_path, capsys):
    out = tmp_path / "out"
    stopping = EarlyStopping("val/score", patience=2)
    report = fit(tmp_path, stopping, saver(tmp_path), ExportPretrained(out, which="best"), kind=Improving)
    assert "best" not in capsys.readouterr().out
    assert report.stopped_by is None
    assert report.best == ("val/score", pytest.approx(0.3), 12)
    assert card(out)["trained for"] == "12 optimizer steps"


def test_a_run_with_all_its_steps_says_that_an_earlier_one_is_exported(tmp_path, capsys):
    fit(tmp_path, saver(tmp_path), ExportPretrained(tmp_path / "out", which="best"))
    printed = capsys.readouterr().out
    assert f"Best val/score 1.5 at step 6; the weights of step 6 are exported to {tmp_path / 'out'}\n" in printed
    assert "stopped the run" not in printed


def test_an_average_is_named_in_the_card(tmp_path):
    fit(tmp_path, WeightAverage(0.5), saver(tmp_path), ExportPretrained(tmp_path / "out", which="best"))
    assert card(tmp_path / "out")["weights"] == "their moving average, decay 0.5"
    assert card(tmp_path / "out")["val/score"] == "1.5"


def test_a_resumed_run_knows_the_best_step_of_before(tmp_path, capsys):
    fit(tmp_path, EarlyStopping("val/score", patience=2), saver(tmp_path), RunCheckpoint(tmp_path))
    assert "stopped the run at step 10" in capsys.readouterr().out
    stopping, out = EarlyStopping("val/score", patience=9), tmp_path / "out"
    again = [stopping, saver(tmp_path), ExportPretrained(out, which="best")]
    report = fit(tmp_path, *again, ckpt_path=tmp_path / "last.ckpt")
    printed = capsys.readouterr().out
    assert report.best == ("val/score", 1.5, 6)
    assert card(out)["val/score"] == "1.5"
    assert "the weights of step 6 are exported" in printed
