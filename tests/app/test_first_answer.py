"""The command answers some questions before it imports torch, and the names that a newcomer tries first."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import train

ROOT = Path(__file__).parents[2]
PROGRAM = """
import runpy, sys
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("loaded:", *{"torch", "lightning", "transformers", "datasets", "numpy", "rich"} & sys.modules.keys())
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--help"], "== Choices: group=option =="),
        (["--cfg", "job"], "_target_: lit_fused.FusedCausalLMModule"),
        (["--version"], "lit-fused .*, torch "),
        (["loss=ccee"], "Could not find 'loss/ccee'"),  # Hydra's sentence
    ],
    ids=lambda value: "",
)
def test_help_and_a_wrong_choice_are_answered_without_torch(words, said, tmp_path):
    program = f"import sys; sys.argv = {[str(ROOT / 'train.py'), *words]}\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert re.search(said, done.stdout + done.stderr), done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"
    assert not (tmp_path / "outputs").exists()


def test_a_mistyped_option_is_answered_with_what_was_meant(tmp_path):
    done = train(tmp_path, "+loss.chunk_sz=1", "+trainer.max_step=3", "+foo=1", status=1)
    for said in ("chunk_sz: unknown (did you mean chunk_size?)", "max_step: unknown (did you mean max_steps?)"):
        assert said in done.output
    assert "foo: unknown; the top level has mode, " in done.output
