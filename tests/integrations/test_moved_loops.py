"""The diffs of the page of loops apply to loops of their kind, whose losses stay as near to float64 as before."""

import re
import runpy
import subprocess
from pathlib import Path

import pytest
import torch

from lit_fused.ops.kernel_path import HeadCall

LOOPS = Path(__file__).parent / "loops"
PAGE = Path(__file__).parents[2] / "docs" / "move_a_loop.md"
DIFFS = {
    name: f"--- {name}.py\n{rest}"
    for name, rest in re.findall(r"^```diff\n--- (\w+)\.py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
}
SLOW = ("hf_trainer", "trl_sft", "trl_dpo", "trl_grpo")
FLOAT32_ROUNDING = 1e-6  # transformers' own losses are in float32, also of a model in float64


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[HeadCall]:
    """Calls of our operators."""
    made, begin = [], HeadCall.__post_init__

    def counted(call: HeadCall) -> None:
        made.append(call)
        begin(call)

    monkeypatch.setattr(HeadCall, "__post_init__", counted)
    return made


def run(script: Path, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(runpy.run_path(str(script))["main"](dtype), dtype=torch.float64)


def test_the_page_has_a_diff_for_each_kind_of_loop():
    assert set(DIFFS) == {path.stem for path in LOOPS.glob("*.py")}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in DIFFS])
def test_a_loop_with_the_pages_diff_applied_has_the_losses_of_the_loop_before(name, tmp_path, monkeypatch, calls):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / f"{name}.py"
    script.write_text((LOOPS / f"{name}.py").read_text())
    truth, own = run(script, torch.float64), run(script, torch.float32)
    assert not calls
    subprocess.run(["git", "apply", "-p0"], input=DIFFS[name], text=True, check=True)
    fused = run(script, torch.float32)
    assert len(calls) >= len(truth) // 3  # A policy's step has three numbers.
    assert (truth[0] - truth[-1]).abs() > 1e-3, "it trains"
    assert (fused - truth).abs().max() <= 2 * (own - truth).abs().max() + FLOAT32_ROUNDING * truth.abs().max()
