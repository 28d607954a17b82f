"""Data parallel training with two real processes on gloo equals one process with the one large batch."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from errors_of import relative_error
from large_batch import ROUNDING, one_large_batch_training
from lightning_helpers import ragged_batches, tiny_llama
from torchrun import run

JOB = Path(__file__).parents[1] / "helpers" / "ddp_job.py"


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("loss", "accumulated"), [("chunked", 2), ("standard", 2), pytest.param("chunked", 1, marks=pytest.mark.slow)]
)
def test_two_ranks_with_ragged_labels_and_accumulation_equal_one_large_batch(loss, accumulated, tmp_path):
    output = run(JOB, 2, tmp_path, loss, str(accumulated), timeout=150)
    result = torch.load(tmp_path / "result.pt", weights_only=False)

    batches = ragged_batches(8)
    truth = tiny_llama().double()
    size = 2 * accumulated  # micro-batches of a step, over both ranks
    steps = [batches[start : start + size] for start in range(0, 8, size)]
    gradients, losses = one_large_batch_training(truth, steps, clip=0.5)
    assert len(result["gradients"]) == len(steps)
    for found, expected in zip(result["gradients"], gradients, strict=True):
        assert relative_error(found, expected) < ROUNDING
    assert relative_error(result["weights"], dict(truth.named_parameters())) < ROUNDING
    assert result["losses"] == pytest.approx(losses, rel=1e-6)

    ids, labels = (torch.cat([b[name] for b in batches]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        logits = truth(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    targets = labels[:, 1:].flatten()
    assert result["val/loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-6)
    hits = (logits.argmax(-1) == targets)[targets != -100]
    assert result["val/accuracy"] == pytest.approx(hits.double().mean().item(), rel=1e-6)
    assert set(result["peaks"]) == {"forward", "backward", "optimizer"}
    ranks = result["peaks by rank"]
    assert result["peaks"] == {phase: max(peaks[phase] for peaks in ranks) for phase in ranks[0]}
    assert ranks[1]["optimizer"] - ranks[0]["optimizer"] > 0.2  # GiB
    memory = result["memory"]
    assert memory["memory/peak_allocated_gib"] == max(memory["memory/rank_0_gib"], memory["memory/rank_1_gib"])
    assert re.search(r"phase +┃ +GiB ┃ rank 0 ┃ rank 1", output)
    assert "sync_dist" not in output  # no warning that epoch figures are of one rank only
