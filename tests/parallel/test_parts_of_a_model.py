"""Models of which a batch needs only parts (vision towers, unused layers), on two ranks: as one process, or refused."""

from itertools import chain
from pathlib import Path

import pytest
import torch
from parts_job import batches_of, fit
from torchrun import run

JOB = Path(__file__).parents[1] / "helpers" / "parts_job.py"
CASES = [
    "ddp:llava:images everywhere",
    "fsdp2:llava:images everywhere",
    "ddp:llava:no images on one rank",
    "ddp:qwen_vl:no images on one rank",
    "fsdp2:gemma3:images everywhere",
]
DIVIDED = (
    "pixel_values is in the batches of some ranks and not of others, and layers that are divided over the ranks must "
    "run on all of them or on none"
)
REFUSED = {
    "fsdp:llava:no images on one rank": DIVIDED,
    "fsdp2:llava:no images on one rank": DIVIDED,
    "ddp:unused:one step": "DDP did not average this step's gradients, as some parameters got none "
    "(model.backbone.extra.weight, model.backbone.extra.bias); set +trainer.strategy.find_unused_parameters=true",
}


@pytest.mark.slow
def test_two_ranks_with_different_images_train_as_one_process_or_say_why_not(tmp_path):
    run(JOB, 2, tmp_path, *CASES, *REFUSED, timeout=280)
    for case in CASES:
        _, model, batches = case.split(":")
        in_order = [*chain.from_iterable(zip(*(batches_of(rank, model, batches) for rank in range(2)), strict=True))]
        trainer, module = fit(tmp_path, model, in_order, accumulate_grad_batches=2)
        found = torch.load(tmp_path / f"{case}.pt")
        assert "refusal" not in found, (case, found)
        for name, value in trainer.callback_metrics.items():
            assert found["logged"][name] == pytest.approx(value.item(), rel=2e-5, abs=1e-6), (case, name)
        for name, p in module.backbone.named_parameters():
            torch.testing.assert_close(found["weights"][name], p.detach(), rtol=1e-4, atol=1e-6)
    for case, message in REFUSED.items():
        assert message in torch.load(tmp_path / f"{case}.pt")["refusal"]
