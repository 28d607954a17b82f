"""Test what a run leaves beside its metrics: where it ran, and why it failed."""

import json

import pytest
from commands import train

from lit_fused import UserError
from lit_fused.app.reporting.runs import record_failure
from lit_fused.errors import Stopped


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (UserError("a sentence; what to do"), "a sentence; what to do"),
        (RuntimeError("two\n  lines"), "RuntimeError: two lines"),
        (MemoryError(), "MemoryError"),
        (KeyboardInterrupt(), "interrupted"),
        (Stopped(15, " at step 3"), "stopped by SIGTERM at step 3"),
        (ValueError("x" * 5000), "ValueError: " + "x" * 988),
    ],
)
def test_a_failure_is_recorded_as_one_sentence_and_the_first_has_the_word(error, sentence, tmp_path):
    path = tmp_path / "error.txt"
    record_failure(path, error)
    record_failure(path, RuntimeError("a consequence, on another rank"))
    assert path.read_text() == sentence + "\n"


def test_a_refused_job_of_a_sweep_leaves_its_overrides_and_its_reason(tmp_path):
    train(tmp_path, "-m", "+foo=1", "seed=1,2", "hydra.sweep.dir=sweep", status=1)
    for number in ("0", "1"):
        assert "foo: unknown" in (tmp_path / "sweep" / number / "error.txt").read_text()
        assert "+foo=1" in json.loads((tmp_path / "sweep" / number / "run.json").read_text())["overrides"]
