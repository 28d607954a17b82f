"""Preferences under every strategy, in two processes, against one process."""

from pathlib import Path

import pytest
import torch
from frozen_cases import fitted
from preference_cases import batches_of, module_for
from torchrun import run

JOB = Path(__file__).parents[1] / "helpers" / "preference_job.py"
CASES = ("ddp:dpo:model", "fsdp2:dpo:model", "tp:dpo:model", "pp:dpo:stored", "pp:orpo:none", "ddp:kto:model")
CASES += ("fsdp2:kto:model", "tp:kto:model", "ddp:simpo:none", "fsdp2:dpo:packed")
IN_HALF = ("fsdp:dpo:stored:bf16-mixed", "fsdp2:dpo:stored:bf16-true")
REFUSED = {
    "pp:dpo:model": "strategy=pp divides one model, and a reference model cannot run beside it; give data with",
    "pp:kto:stored": "objective=kto runs the model a second time, on answers to other prompts, which strategy=pp does",
}


@pytest.mark.slow
def test_two_processes_train_as_one_does_or_say_why_not(tmp_path):
    run(JOB, 2, tmp_path, *CASES, *IN_HALF, *REFUSED, timeout=300)
    for case in CASES:
        _, objective, reference = case.split(":")
        module = module_for(objective, reference)
        trainer = fitted(tmp_path, module, batches_of(objective, reference), accumulate_grad_batches=2)
        found = torch.load(tmp_path / f"{case.replace(':', '_')}.pt")
        assert "refusal" not in found, (case, found)
        for name, value in trainer.callback_metrics.items():
            assert found["logged"][name] == pytest.approx(value.item(), rel=2e-5, abs=1e-6), (case, name)
        for name, p in module.backbone.named_parameters():
            torch.testing.assert_close(found["weights"][name], p.detach(), rtol=1e-4, atol=1e-6)
    for case in IN_HALF:
        found = torch.load(tmp_path / f"{case.replace(':', '_')}.pt")["references"][0]
        assert torch.equal(found, batches_of("dpo", "stored")[0]["reference_log_prob"]), (case, found)
    for case, message in REFUSED.items():
        assert message in torch.load(tmp_path / f"{case.replace(':', '_')}.pt")["refusal"]
