"""A run that is resumed in its own folder: its metrics continue, and its end is made up for if it was killed there."""

import csv
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from commands import SYNTHETIC, TINY_MODEL, train

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
    with (folder / "metrics.csv").open() as file:
        found = [(row["step"], row["train/loss"], row["val/loss"]) for row in csv.DictReader(file)]
    return [row for row in found if row[1] or row[2]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    finished = train(folder, *JOB, "hydra.run.dir=whole")
    assert finished.status == 0, finished.output
    return folder / "whole"


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_a_run_resumed_where_a_validation_was_due_logs_it_once(tmp_path):
    job = [*JOB, "trainer.val_check_interval=4", "callbacks.checkpoint.save_top_k=-1", "hydra.run.dir=out"]
    assert train(tmp_path, *job).status == 0
    before = rows(tmp_path / "out")
    assert len([row for row in before if row[2]]) == 3
    finished = train(tmp_path, "ckpt_path=out/checkpoints/step-000008.ckpt", "hydra.run.dir=out")
    assert finished.status == 0, finished.output
    assert rows(tmp_path / "out") == before


@pytest.mark.slow
def test_a_run_killed_between_its_last_checkpoint_and_its_end_is_validated_and_exported(whole, tmp_path):
    run = tmp_path / "out"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "exported")
    (run / "summary.json").unlink()
    for _ in ("killed", "finished"):
        finished = train(tmp_path, *JOB, "ckpt_path=out/checkpoints/last.ckpt", "hydra.run.dir=out")
        assert finished.status == 0, finished.output
        assert "Nothing is left to train: the checkpoint is at step 12, and training ends at step 12." in finished.plain
        weights = [(folder / "exported" / "model.safetensors").read_bytes() for folder in (whole, run)]
        assert weights[0] == weights[1]
        for name in ("val/loss", "val/perplexity"):
            assert summary(run)["metrics"][name] == pytest.approx(summary(whole)["metrics"][name], rel=1e-5)
        assert rows(run) == rows(whole)


@pytest.mark.slow
def test_a_run_resumed_in_its_folder_goes_on_with_its_metrics_and_none_is_there_twice(whole, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")]))
    record = ["+callbacks.record._target_=batch_record.BatchRecord", f"+callbacks.record.folder={tmp_path}"]
    killed = train(tmp_path, *JOB, *record, "hydra.run.dir=out", "+callbacks.record.die_at=10")
    assert killed.status == -signal.SIGKILL, killed.output
    assert len(rows(tmp_path / "out")) == 9 + 1
    (tmp_path / "out" / ".environment.json.4321").touch()
    # Lightning writes the metrics of the step that was saved, 8 (7 from 0), after it was saved.
    metrics = tmp_path / "out" / "metrics.csv"
    lines = metrics.read_text().splitlines(keepends=True)
    step = lines[0].strip().split(",").index("step")
    metrics.write_text("".join(line for line in lines if line.split(",")[step] != "7"))
    again = train(tmp_path, *JOB, "hydra.run.dir=out")
    assert again.status == 1
    assert "this one would replace its checkpoints, metrics.csv. Resume that run with ckpt_path=" in again.plain
    go_on = ["ckpt_path=out/checkpoints/last.ckpt", "+callbacks.record.die_at=1000"]
    resumed = train(tmp_path, *JOB, *record, "hydra.run.dir=out", *go_on)
    assert resumed.status == 0, resumed.output
    assert rows(tmp_path / "out") == rows(whole)
    assert not (tmp_path / "out" / ".environment.json.4321").exists()
    config = (tmp_path / "out" / ".hydra" / "config.yaml").read_text()
    assert "ckpt_path: out/checkpoints/last.ckpt" in config
    assert not (tmp_path / "out" / ".hydra" / "resumed").exists()


def test_validating_in_the_folder_of_a_fit_leaves_the_results_of_the_fit(whole):
    names = ("summary.json", "report.html", "metrics.csv", ".hydra/config.yaml")
    before = [(whole / name).read_bytes() for name in names]
    last = "ckpt_path=whole/checkpoints/last.ckpt"
    finished = train(whole.parent, *JOB, "mode=validate", last, "hydra.run.dir=whole")
    assert finished.status == 0, finished.output
    assert [(whole / name).read_bytes() for name in names] == before
    assert summary(whole / "validate")["metrics"]["val/loss"] == pytest.approx(summary(whole)["metrics"]["val/loss"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_run_of_two_ranks_killed_before_its_end_is_validated_and_exported(strategy, tmp_path):
    whole, out, two = tmp_path / "whole", tmp_path / "out", [f"strategy={strategy}", "trainer.devices=2"]
    finished = train(tmp_path, *JOB, *two, "trainer.accelerator=cpu", "hydra.run.dir=whole", ranks=2)
    assert finished.status == 0, finished.output
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns("exported", "summary.json"))
    again = train(tmp_path, "ckpt_path=out/checkpoints/last.ckpt", "hydra.run.dir=out", ranks=2)
    assert again.status == 0, again.output
    assert again.plain.count("Nothing is left to train") == 1
    weights = [(folder / "exported" / "model.safetensors").read_bytes() for folder in (whole, out)]
    assert weights[0] == weights[1]
    assert summary(out)["metrics"]["val/loss"] == pytest.approx(summary(whole)["metrics"]["val/loss"])
    assert rows(out) == rows(whole)
