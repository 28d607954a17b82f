"""A fused model on two ranks: the weights after some steps, and what was gathered, are those without ``fuse``."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fused_job import STEPS
from torchrun import run

SCRIPT = Path(__file__).parents[1] / "helpers" / "fused_job.py"
PLACEMENTS = ("ddp", "fsdp1", "fsdp1_views", "fsdp2", "fsdp2_units", "tensor")
MODELS = ("qwen3", "gemma2")  # gemma2: a cap, and embeddings tied to the head


def cases_of(placement: str) -> list[str]:
    """Return, for each model, the standard in float64, that in float32, and ours, fused before and after `prepare`."""
    models = MODELS[:1] if placement == "fsdp2_units" else MODELS  # Tied weights are in one unit.
    kinds = ["never:float64", "never:float32", "first:float32", "prepared:float32"]
    if placement == "tensor":  # transformers divides a model when it loads it
        kinds.remove("first:float32")
    return [f"{placement}:{model}:{kind}" for model in models for kind in kinds]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    cases = [case for placement in PLACEMENTS for case in cases_of(placement)]
    cases += [f"fsdp2_bf16:gemma2:{moment}:float32" for moment in ("never", "first")]
    cases.append("fsdp1_units:qwen3:first:float32")
    run(SCRIPT, 2, folder, *cases, timeout=240)
    return {case: torch.load(folder / f"{case.replace(':', '_')}.pt") for case in cases}


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for p in PLACEMENTS for c in cases_of(p) if "never" not in c])
def test_weights_losses_and_gathers_are_those_without_fuse(results: dict[str, Any], case: str) -> None:
    placement, model, *_ = case.split(":")
    truth, own = results[f"{placement}:{model}:never:float64"], results[f"{placement}:{model}:never:float32"]
    found = results[case]
    usual = (own["losses"] - truth["losses"]).abs().max()
    assert (found["losses"] - truth["losses"]).abs().max() <= 2 * usual + 1e-6
    for name, weight in truth["weights"].items():
        error, usual = ((other["weights"][name] - weight).norm() for other in (found, own))
        assert error <= 2 * usual + 1e-6 * weight.norm(), name
    # The first step may have identified the head.
    assert len(found["gathers"]) == STEPS
    assert all(ours <= theirs for ours, theirs in zip(found["gathers"][1:], own["gathers"][1:], strict=True))


@pytest.mark.slow
def test_half_precision_of_sharded_units_is_no_fault_of_the_model(results: dict[str, Any]) -> None:
    own, found = (results[f"fsdp2_bf16:gemma2:{moment}:float32"] for moment in ("never", "first"))
    torch.testing.assert_close(found["losses"], own["losses"], rtol=2**-7, atol=0)


@pytest.mark.slow
def test_an_output_layer_that_fsdp1_gathers_for_itself_is_refused(results: dict[str, Any]) -> None:
    assert "FullyShardedDataParallel, not a plain linear layer" in results["fsdp1_units:qwen3:first:float32"]["refusal"]
