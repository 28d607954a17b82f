"""Cells of benchmarks of whole steps, each a process with limits of its own."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
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
    monkeypatch.setattr(sys, "argv", [str(path), "--warm-up-limit", "4", "--limit", "1"])
    return path


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


@pytest.mark.usefixtures("script")
def test_cells_after_the_minutes_given_are_named_and_not_run():
    assert run_cells([{"cell": "good"}], None, 0) == [{"cell": "good", "error": "not begun within 0 minutes"}]
