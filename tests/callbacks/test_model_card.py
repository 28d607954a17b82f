"""The card beside exported weights tells of these weights, of whichever step they are."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama

from lit_fused import FusedCausalLMModule
from lit_fused.callbacks import ExportPretrained, RunCheckpoint, WeightAverage


class Scores(FusedCausalLMModule):
    """Its validations measure these values, one after the other, beside the loss."""

    values = (3.0, 2.0, 1.5, 2.5, 2.6, 2.7)

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.log("val/score", self.values[self.trainer.global_step // 2 - 1])


def fit(folder: Path, *callbacks: L.Callback, ckpt_path: Any = None) -> None:
    saver = ModelCheckpoint(folder, "best-{step}", monitor="val/score", save_on_train_epoch_end=False)
    settings = {"max_steps": 12, "val_check_interval": 2, "check_val_every_n_epoch": None}
    trainer = quiet_trainer(folder, callbacks=[*callbacks, saver], enable_checkpointing=True, **settings)
    data = loader(ragged_batches(4)), loader(ragged_batches(2))
    trainer.fit(Scores(tiny_llama()), *data, ckpt_path=ckpt_path)


def card(folder: Path) -> dict[str, str]:
    rows = [line.strip("| ").split(" | ") for line in (folder / "README.md").read_text().splitlines() if "| " in line]
    return {row[0]: row[1] for row in rows if len(row) == 2}


def test_the_card_of_the_best_step_of_a_run_that_was_stopped_has_its_numbers(tmp_path):
    losses: dict[int, float] = {}

    class Losses(L.Callback):
        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            losses[trainer.global_step] = float(trainer.callback_metrics["val/loss"])

    out = tmp_path / "out"
    fit(tmp_path, EarlyStopping("val/score", patience=2), Losses(), ExportPretrained(out, which="best"))
    assert card(out)["trained for"] == "6 optimizer steps of 10"
    assert card(out)["val/score"] == "1.5"
    assert card(out)["val/loss"] == f"{losses[6]:.4g}" != f"{losses[10]:.4g}"


def test_an_average_is_named_in_the_card(tmp_path):
    fit(tmp_path, WeightAverage(0.5), ExportPretrained(tmp_path / "out", which="best"))
    assert card(tmp_path / "out")["weights"] == "their moving average, decay 0.5"
    assert card(tmp_path / "out")["val/score"] == "1.5"


def test_a_resumed_run_knows_the_best_step_of_before(tmp_path):
    fit(tmp_path, EarlyStopping("val/score", patience=2), RunCheckpoint(tmp_path))
    out = tmp_path / "out"
    again = [EarlyStopping("val/score", patience=9), ExportPretrained(out, which="best")]
    fit(tmp_path, *again, ckpt_path=tmp_path / "last.ckpt")
    assert card(out)["val/score"] == "1.5"
