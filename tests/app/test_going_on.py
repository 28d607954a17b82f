"""A run that is resumed in its own folder: its metrics continue."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from commands import SYNTHETIC, TINY_MODEL, summary, train

from lit_fused.app.run_folder import metric_rows, read_run_file

HELPERS = Path(__file__).parents[1] / "helpers"
JOB = [
    *SYNTHETIC,
    *TINY_MODEL,
    "trainer.max_steps=12",
    "trainer.val_check_interval=6",
    "callbacks.checkpoint.every_n_train_steps=4",
    "~callbacks.sample_text",
]


def rows(folder: Path) -> list[tuple[str, ...]]:
    """Return what a run has logged of its losses."""
    found = [(row["step"], row.get("train/loss", ""), row.get("val/loss", "")) for row in metric_rows(folder)]
    return [row for row in found if row[1] or row[2]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(folder, *JOB, "hydra.run.dir=whole")
    return folder / "whole"


def test_a_run_resumed_where_a_validation_was_due_logs_it_once(tmp_path):
    job = [*JOB, "trainer.val_check_interval=4", "callbacks.checkpoint.keep_all=true", "hydra.run.dir=out"]
    train(tmp_path, *job)
    before = rows(tmp_path / "out")
    assert len([row for row in before if row[2]]) == 3
    train(tmp_path, "ckpt_path=out/checkpoints/step-000008.ckpt", "hydra.run.dir=out")
    assert rows(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, []),
        pytest.param(2, ["strategy=ddp"], marks=pytest.mark.slow),
        pytest.param(2, ["strategy=fsdp2"], marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_between_its_last_checkpoint_and_its_end_is_validated_and_exported(ranks, more, tmp_path):
    more = [*more, f"trainer.devices={ranks}", "trainer.accelerator=cpu"]
    train(tmp_path, *JOB, *more, "hydra.run.dir=whole", ranks=ranks)
    whole, run = tmp_path / "whole", tmp_path / "out"
    shutil.copytree(whole, run, ignore=shutil.ignore_patterns("exported", "summary.json"))
    finished = train(tmp_path, "ckpt_path=out", "hydra.run.dir=out", ranks=ranks)
    assert finished.plain.count("Nothing is left to train: the checkpoint is at step 12.") == 1
    weights = [(folder / "exported" / "model.safetensors").read_bytes() for folder in (whole, run)]
    assert weights[0] == weights[1]
    for name in ("val/loss", "val/perplexity", "train/loss"):
        assert summary(run)["metrics"][name] == pytest.approx(summary(whole)["metrics"][name], rel=1e-5)
    assert [row[:2] for row in rows(run) if row[1]] == [row[:2] for row in rows(whole) if row[1]]


@pytest.mark.slow
def test_a_run_resumed_in_its_folder_goes_on_with_its_metrics_and_none_is_there_twice(whole, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")]))
    record = ["+callbacks.record._target_=batch_record.BatchRecord", f"+callbacks.record.folder={tmp_path}"]
    train(tmp_path, *JOB, *record, "hydra.run.dir=out", "+callbacks.record.die_at=10", status=-signal.SIGKILL)
    assert len(rows(tmp_path / "out")) == 9 + 1
    refused = train(tmp_path, "ckpt_path=out", "hydra.run.dir=out", status=1)
    assert "'+callbacks.record._target_=batch_record.BatchRecord', which could run code" in refused.plain
    go_on = ["ckpt_path=out", "+callbacks.record.die_at=1000"]
    train(tmp_path, *JOB, *record, "hydra.run.dir=out", *go_on)
    assert rows(tmp_path / "out") == rows(whole)
    assert read_run_file(tmp_path / "out")["config"]["ckpt_path"] == "out/checkpoints/last.ckpt"


def test_validating_in_the_folder_of_a_fit_is_refused(whole):
    finished = train(whole.parent, *JOB, "mode=validate", "ckpt_path=whole", "hydra.run.dir=whole", status=1)
    assert "whole has a run already" in finished.plain
