"""The choices of conf/, as a command gets them: optimisers, schedules, trainers, debugging, early stopping."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import SYNTHETIC, TINY_MODEL, summary, train
from composed import composed
from hydra.utils import instantiate
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator

from lit_fused.app.config import leave_mps
from lit_fused.errors import UserError


def rates(*overrides: str, steps: int = 20) -> list[float]:
    """The learning rate of each step, of which the largest is 1."""
    build: Any = instantiate(composed(*overrides).scheduler)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    takes_steps = "num_training_steps" in inspect.signature(build).parameters
    schedule = build(optimizer, **({"num_training_steps": steps} if takes_steps else {}))
    found = []
    for _ in range(steps):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


def test_the_schedules_warm_up_over_a_tenth_of_the_steps_and_end_as_they_say():
    linear, constant, wsd = (rates(f"scheduler={name}") for name in ("linear", "constant_with_warmup", "wsd"))
    for found in (linear, constant, wsd, rates("scheduler=cosine")):
        assert found[:3] == [0.0, 0.5, 1.0]
    assert linear[2:] == pytest.approx([1 - step / 18 for step in range(18)])
    assert constant[2:] == [1.0] * 18
    assert wsd[2:16] == [1.0] * 14
    assert wsd[16:] == pytest.approx([1 - (step / 4) ** 0.5 for step in range(4)])
    assert rates("scheduler=constant") == [1.0] * 20
    floor = rates("scheduler=wsd", "scheduler.min_lr_ratio=0.1", "scheduler.decay_type=linear", steps=21)
    assert floor[17:] == pytest.approx([1.0, 0.775, 0.55, 0.325])


def test_a_warm_up_and_a_decay_longer_than_the_run_are_refused():
    with pytest.raises(UserError, match=r"take 0.5 and 0.7 of the steps, more than all of them; choose a smaller"):
        rates("scheduler=wsd", "scheduler.warmup_fraction=0.5", "scheduler.decay_fraction=0.7")


TINY = [*TINY_MODEL, *SYNTHETIC, "trainer.accelerator=cpu"]


def run(folder: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    """Return what a run left in summary.json, and what it printed."""
    folder.mkdir(exist_ok=True)
    done = train(folder, *TINY, *overrides, "hydra.run.dir=run")
    return summary(folder / "run"), done.output


def test_debug_fast_does_everything_in_two_steps(tmp_path):
    found, said = run(tmp_path, "debug=fast", "test=true")
    assert found["steps"] == 2
    assert {"train/loss", "val/loss", "test/loss"} <= found["metrics"].keys()
    assert (tmp_path / "run" / "exported" / "config.json").exists()
    assert "test/loss" in said
    assert not [odd for odd in ("was configured", "TPU", "e+0", "site-packages", "Restoring") if odd in said]


@pytest.mark.slow
def test_debug_overfit_learns_one_batch_and_debug_profile_leaves_the_times(tmp_path):
    found, _ = run(tmp_path / "a", "debug=overfit", "optimizer.lr=3e-2", "model.config.hidden_size=64")
    assert found["steps"] == 100
    assert found["metrics"]["train/loss"] < 1
    found, _ = run(tmp_path / "b", "debug=profile")
    assert found["steps"] == 20
    assert "run_training_batch" in (tmp_path / "b" / "run" / "fit-profile.txt").read_text()


@pytest.mark.slow
def test_early_stopping_ends_a_run_that_learns_nothing_and_exports_the_best(tmp_path):
    words = ["callbacks=early_stopping", "trainer.val_check_interval=2", "optimizer.lr=0", "trainer.max_steps=40"]
    found, _ = run(tmp_path, *words, "test=true")
    assert found["steps"] == 8  # the first validation, and three that are no better
    assert found["metrics"]["test/loss"] == pytest.approx(found["metrics"]["val/loss"])
    train(tmp_path, "ckpt_path=run/checkpoints/last.ckpt", "callbacks.early_stopping.patience=9")


def test_where_the_default_would_be_mps_a_run_uses_the_cpu_and_says_so_once(monkeypatch):
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: False))
    cfg, chosen = composed(), composed("trainer.accelerator=mps")
    with pytest.warns(UserWarning, match="MPS has no float64, .* this run uses the CPU") as warned:
        leave_mps(cfg)
    leave_mps(chosen)
    assert (cfg.trainer.accelerator, chosen.trainer.accelerator, len(warned)) == ("cpu", "mps", 1)
