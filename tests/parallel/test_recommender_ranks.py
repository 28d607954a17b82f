"""Recommenders in two processes, of which one has a user less, against one process over all users."""

from pathlib import Path

import pytest
import torch
from recommender_job import fitted, write_interactions
from torchrun import run

JOB = Path(__file__).parents[1] / "helpers" / "recommender_job.py"
KINDS = ("causal", "weighted", "bidirectional")
CASES = [f"{strategy}:{kind}" for kind in KINDS for strategy in ("ddp", "fsdp2")]
REFUSED = {
    "tp:causal": "tensor parallelism divides a model of transformers",
    "pp:causal": "strategy=pp cannot divide SASRec: it is no transformers model",
}


@pytest.mark.slow
def test_two_processes_train_rank_and_recommend_as_one_does_or_say_why_not(tmp_path):
    write_interactions(tmp_path / "x.parquet")
    output = run(JOB, 2, tmp_path, *CASES, *REFUSED, timeout=400)
    assert "sync_dist" not in output  # no warning that epoch figures are of one rank only
    for kind in KINDS:
        alone = fitted(tmp_path, kind, 1, "single")
        for name in ("fit: train/loss", "val/ndcg_at_3", "test/recall_at_3", "test/mrr", "test/coverage_at_3"):
            assert name in alone["logged"]
        assert 0 < alone["logged"]["test/coverage_at_3"] < 1
        for case in (case for case in CASES if case.endswith(kind)):
            found = torch.load(tmp_path / f"{case.replace(':', '_')}.pt")
            assert "refusal" not in found, (case, found)
            assert found["logged"] == pytest.approx(alone["logged"], rel=1e-6), case
            assert torch.equal(found["items"], alone["items"])
            for name, value in alone["weights"].items():
                torch.testing.assert_close(found["weights"][name], value, rtol=1e-9, atol=1e-12)
    for case, message in REFUSED.items():
        assert message in torch.load(tmp_path / f"{case.replace(':', '_')}.pt")["refusal"], case
