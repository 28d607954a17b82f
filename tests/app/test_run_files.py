"""Test what a run leaves beside its metrics: where it ran, and why it failed."""

import os
import subprocess
import sys

import pytest
from composed import composed

from lit_fused import UserError
from lit_fused.app.commands import run
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


def test_a_failure_and_a_configuration_are_text_in_utf_8_also_where_the_locale_is_another(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("prompt: über\nmode: fit\n", encoding="utf-8")
    (tmp_path / "metrics.csv").touch()
    code = (
        "import sys, pathlib\n"
        "from lit_fused.app.reporting.runs import record_failure\n"
        "from lit_fused.app.run_folder import fitted\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "assert fitted(folder)\n"
        "record_failure(folder / 'error.txt', ValueError('\\u00fcber'))\n"
    )
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env={**os.environ, **locale})
    assert (tmp_path / "error.txt").read_text(encoding="utf-8") == "ValueError: über\n"


def test_a_refused_run_leaves_its_reason_in_place_of_that_of_an_earlier_run(tmp_path):
    (tmp_path / "error.txt").write_text("of an earlier run")
    cfg = composed("+foo=1")
    cfg.output_dir = str(tmp_path)
    with pytest.raises(Exception, match="foo: unknown"):
        run(cfg)
    assert "foo: unknown" in (tmp_path / "error.txt").read_text()
