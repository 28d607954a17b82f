"""Disks that are full: a run ends with the error of the library, nothing half written is left, and it can go on."""

import os
from pathlib import Path

import lightning as L
import pytest
import torch
from commands import SYNTHETIC, TINY_MODEL, train

from lit_fused.atomic import checkpoints_in
from lit_fused.parallel.checkpoint import CheckpointFiles

JOB = [*SYNTHETIC, *TINY_MODEL, "trainer.max_steps=12", "callbacks.checkpoint.every_n_train_steps=4"]
HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.mark.slow
def test_a_run_whose_disk_is_full_keeps_its_last_whole_checkpoint_and_goes_on_from_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")]))
    full = {"_target_": "full_disk.FullDisk", "step": 7, "size": 20_000}
    disk = [f"+callbacks.full.{name}={value}" for name, value in full.items()]
    stopped = train(tmp_path, *JOB, *disk, "hydra.run.dir=out", status=1)
    assert "last.ckpt.partial" in stopped.output
    assert [path.name for path in checkpoints_in(tmp_path / "out" / "checkpoints")]
    assert not list((tmp_path / "out").rglob("*.partial"))
    assert (tmp_path / "out" / "error.txt").read_text()
    train(tmp_path, *JOB, "ckpt_path=out/checkpoints/last.ckpt", *disk, "callbacks.full.step=999")


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before_it(tmp_path):
    plugin, path = CheckpointFiles(L.Trainer(accelerator="cpu", logger=False)), tmp_path / "last.ckpt"
    plugin.save_checkpoint({"weights": torch.ones(3)}, path)
    with pytest.raises(AttributeError):
        plugin.save_checkpoint({"weights": lambda: None}, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]
