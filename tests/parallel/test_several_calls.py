"""One trainer is called several times in two processes: it validates, fits, tests and fits again."""

from pathlib import Path

import pytest
import torch
from torchrun import run

JOB = Path(__file__).parents[1] / "helpers" / "several_calls_job.py"
MODELS = ("llama", "qwen3_tied", "sasrec")


@pytest.mark.slow
def test_a_sharded_module_is_validated_fitted_tested_and_fitted_again_as_a_replicated_one(tmp_path):
    cases = [f"{strategy}:{model}" for model in MODELS for strategy in ("ddp", "fsdp2")]
    run(JOB, 2, tmp_path, *cases, timeout=300)
    for model in MODELS:
        copies = torch.load(tmp_path / f"ddp_{model}.pt")
        assert copies["losses"][0] > copies["losses"][1] > copies["losses"][2]
        found = torch.load(tmp_path / f"fsdp2_{model}.pt")
        assert found["losses"] == pytest.approx(copies["losses"], rel=1e-6), model
        assert found["weights"].keys() == copies["weights"].keys()
        for name, value in copies["weights"].items():
            torch.testing.assert_close(found["weights"][name], value, rtol=1e-4, atol=1e-6)
