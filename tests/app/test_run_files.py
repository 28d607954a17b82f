"""Test what a run leaves beside its metrics: where it ran, and why it failed."""

import json
import os
import subprocess
import sys

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


def test_a_failure_is_text_in_utf_8_also_where_the_locale_is_another(tmp_path):
    code = (
        "import sys, pathlib\n"
        "from lit_fused.app.reporting.runs import record_failure\n"
        "record_failure(pathlib.Path(sys.argv[1]) / 'error.txt', ValueError('\\u00fcber'))\n"
    )
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env={**os.environ, **locale})
    assert (tmp_path / "error.txt").read_text(encoding="utf-8") == "ValueError: über\n"


def test_a_refused_job_of_a_sweep_leaves_its_overrides_and_its_reason(tmp_path):
    done = train(tmp_path, "-m", "+foo=1", "seed=1,2", "hydra.sweep.dir=sweep")
    assert done.status == 1
    for number in ("0", "1"):
        assert "foo: unknown" in (tmp_path / "sweep" / number / "error.txt").read_text()
        assert "+foo=1" in json.loads((tmp_path / "sweep" / number / "run.json").read_text())["overrides"]
