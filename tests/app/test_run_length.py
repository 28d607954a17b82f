"""How long a run is by steps, by epochs and by both, and when it validates."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import SYNTHETIC, TINY_MODEL, summary, train
from composed import composed
from omegaconf import OmegaConf

from lit_fused.app.defaults import open_values

TINY = [*TINY_MODEL, *SYNTHETIC, "trainer.accelerator=cpu", "callbacks=measure", "trainer.enable_checkpointing=false"]


def steps_and_validations(folder: Path, *overrides: str) -> tuple[int, list[int]]:
    """The steps of a run, and the steps after which it validated."""
    train(folder, *TINY, *overrides, "hydra.run.dir=run")
    with (folder / "run" / "metrics.csv").open() as file:
        validated = [int(row["step"]) + 1 for row in csv.DictReader(file) if row.get("val/loss")]
    return summary(folder / "run")["steps"], validated


@pytest.mark.parametrize(
    ("overrides", "steps", "validated"),
    [
        pytest.param(["trainer.max_epochs=3"], 24, [8, 16, 24], marks=pytest.mark.slow),
        (["trainer.max_epochs=3", "trainer.max_steps=11"], 11, [8, 11]),
        (["trainer.max_steps=7", "trainer.accumulate_grad_batches=3"], 7, [7]),  # the last step of an epoch has two
        pytest.param(["trainer.max_epochs=2", "trainer.val_check_interval=6"], 16, [6, 12], marks=pytest.mark.slow),
        pytest.param(["trainer.max_steps=6", "trainer.val_check_interval=0.5"], 6, [4, 6], marks=pytest.mark.slow),
    ],
)
def test_a_run_ends_and_validates_where_its_settings_say(overrides, steps, validated, tmp_path):
    assert steps_and_validations(tmp_path, *overrides) == (steps, validated)


def test_what_the_settings_leave_open_is_filled_in_and_the_rest_stays():
    def lengths(*overrides: str) -> list:
        node: Any = OmegaConf.to_container(composed(*overrides).trainer)
        node |= open_values(node)
        return [node[key] for key in ("max_steps", "val_check_interval", "check_val_every_n_epoch")]

    assert lengths() == [250, 63, None]
    assert lengths("trainer.max_steps=19") == [19, 19, None]
    assert lengths("trainer.accumulate_grad_batches=4") == [250, 252, None]
    assert lengths("trainer.max_epochs=-1", "trainer.max_steps=-1") == [-1, 1.0, 1]
    assert lengths("trainer.val_check_interval=50", "trainer.max_epochs=2") == [-1, 50, None]
    assert open_values(
        {"max_epochs": 3, "max_steps": -1, "val_check_interval": None, "check_val_every_n_epoch": None}
    ) == {"val_check_interval": 1.0, "check_val_every_n_epoch": 1}
    assert open_values({"_target_": "my.Trainer"}) == {}


@pytest.mark.parametrize(("has_gpu", "overrides", "expected"), [
    (True, [], 10), (True, ["trainer=cpu"], 1), (True, ["trainer.log_every_n_steps=1"], 1), (False, [], 1),
])  # fmt: skip
def test_steps_of_a_gpu_are_logged_every_ten_since_lightning_waits_for_it_to_log(
    has_gpu, overrides, expected, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    node: Any = OmegaConf.to_container(composed(*overrides).trainer)
    assert (node | open_values(node))["log_every_n_steps"] == expected
