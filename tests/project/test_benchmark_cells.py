"""Cells of benchmarks of whole steps, each a process with limits of its own."""

import argparse
import json
import signal
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import distillation_run
from cells import run_cells

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = f"""
import argparse, json, sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
from cells import add_limits, begin_warm_up, end_warm_up

parser = argparse.ArgumentParser()
parser.add_argument("--cell")
add_limits(parser)
options = parser.parse_args()
begin_warm_up(options)
time.sleep(60 if options.cell == "slow to compile" else 1.5)
end_warm_up(options)
time.sleep(60 if options.cell == "slow" else 0)
if options.cell == "broken":
    raise RuntimeError("out of memory")
print(json.dumps({{"tokens_per_sec": 1.0}}))
"""


@pytest.fixture
def script(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", [str(path), "--warm-up-limit", "8", "--limit", "4"])
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("script")
def test_the_limit_of_measured_steps_does_not_count_the_warm_up(tmp_path):
    names = ["good", "slow to compile", "slow", "broken"]
    out = tmp_path / "cells.json"
    rows = run_cells([{"cell": name} for name in names], out)
    assert [row["cell"] for row in rows] == names
    assert rows[0] == {"cell": "good", "tokens_per_sec": 1.0}
    assert [row["error"] for row in rows[1:3]] == [
        "the warm-up took longer than the limit", "the measured steps took longer than the limit",
    ]  # fmt: skip
    assert rows[3]["error"].endswith("RuntimeError: out of memory")
    assert json.loads(out.read_text()) == rows


@pytest.fixture
def tiny():
    """Options of a cell with tiny models, whose limit ends with the test."""
    sizes = {"tiny": True, "rows": 2, "length": 16, "steps": 2, "compile": "none", "checkpointing": False}
    yield argparse.Namespace(**sizes, loss="jsd", warm_up_limit=60, limit=60)
    signal.alarm(0)


@pytest.mark.slow
@pytest.mark.parametrize("loss", distillation_run.LOSSES)
def test_a_distillation_in_lightning_has_the_references_loss_and_gradient(tiny, loss):
    tiny.cell, tiny.loss = "lit_fused", loss
    row = distillation_run.measure(tiny)
    assert row["loss_error"] < 0.001
    assert row["gradient_error"] < 0.02
    assert row["tokens_per_sec"] > 0


@pytest.mark.parametrize("wrong", ["value", "gradient"])
def test_a_provider_with_a_wrong_distillation_has_no_speed(tiny, wrong, monkeypatch):
    right = distillation_run.mean_loss

    def mean_loss(name, student, teacher, targets):
        loss = right(name, student, teacher, targets)
        if student.dtype == torch.float64:
            return loss
        return 1.1 * loss if wrong == "value" else loss + 0.5 * (loss - loss.detach())

    monkeypatch.setattr(distillation_run, "mean_loss", mean_loss)
    tiny.cell = "plain"
    row = distillation_run.measure(tiny)
    assert row["error"].startswith("wrong")
    assert "tokens_per_sec" not in row
