"""A run that goes on from a checkpoint has every validation, and what goes by it, that an unbroken run has."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning_helpers import quiet_trainer
from tiny_models import tiny_model
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lit_fused import FusedCausalLMModule
from lit_fused.callbacks import RunCheckpoint
from lit_fused.data import SyntheticDataModule

STEPS = 12  # of two epochs


class Seen(L.Callback):
    """Records validations, by step, with their loss and the step of their row, and ends of epochs."""

    def __init__(self) -> None:
        self.validations: list[tuple[int, float, int]] = []
        self.epochs: list[tuple[int, int]] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loss, row = float(trainer.callback_metrics["val/loss"]), trainer.fit_loop.epoch_loop._batches_that_stepped
        self.validations.append((trainer.global_step, loss, row))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.epochs.append((trainer.global_step, trainer.current_epoch))


def fit(folder: Path, checkpoint: Path | None = None, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    seen, patience = Seen(), EarlyStopping("val/loss", patience=50)
    saver = RunCheckpoint(folder, every_n_train_steps=1, keep_all=True)
    best = ModelCheckpoint(folder, "best", monitor="val/loss", enable_version_counter=False)
    module = FusedCausalLMModule(
        tiny_model("llama"),
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        scheduler=partial(ReduceLROnPlateau, factor=0.5, patience=0, threshold=10.0),
    )
    callbacks = [saver, best, seen, patience]
    trainer = quiet_trainer(folder, max_steps=STEPS, callbacks=callbacks, enable_checkpointing=True, **options)
    micro_batches = trainer.accumulate_grad_batches * STEPS // 2
    trainer.fit(module, SyntheticDataModule(64, 12, 2, micro_batches, 2), ckpt_path=checkpoint)
    return {
        "weights": torch.cat([p.detach().flatten() for p in module.parameters()]).tolist(),
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "waited": patience.wait_count,
        "best": best.best_model_score,
        "validations": seen.validations,
        "epochs": seen.epochs,
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"val_check_interval": 3},
        {"val_check_interval": 2, "check_val_every_n_epoch": None},
        {"val_check_interval": 4, "check_val_every_n_epoch": None, "accumulate_grad_batches": 2},
    ],
    ids=str,
)
def test_a_validation_that_a_kill_left_out_is_made_up_for_with_all_that_goes_by_it(options, tmp_path):
    unbroken = fit(tmp_path / "whole", **options)
    for step in (2, 4, 6, 9):
        folder = Path(shutil.copytree(tmp_path / "whole", tmp_path / f"from {step}"))  # with the best checkpoint
        resumed = fit(folder, folder / f"step-{step:06d}.ckpt", **options)
        for name in ("validations", "epochs"):
            assert resumed[name] == [entry for entry in unbroken[name] if entry[0] >= step], (step, name)
        for name in ("lr", "waited", "best", "weights"):
            assert resumed[name] == unbroken[name], (step, name)
