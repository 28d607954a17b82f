"""Two ranks with loaders of a project's own: as many batches as each has, exact, or refused on all ranks together."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning_helpers import ragged_batches, tiny_llama
from torchrun import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
JOB = Path(__file__).parents[1] / "helpers" / "own_data_job.py"


def found(folder: Path, case: str) -> Any:
    run(JOB, 2, folder, case, timeout=150)
    return torch.load(folder / f"{case.replace(':', '_')}.pt", weights_only=False)


def mean_loss(batches: list[Any], model: Any = None) -> torch.Tensor:
    ids, labels = (torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels"))
    logits = (model or tiny_llama()).double()(input_ids=ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def test_ranks_that_have_batches_of_different_loaders_log_each_loaders_loss(tmp_path):
    batches = ragged_batches(5)
    first, second = found(tmp_path, "ddp:one_each")
    assert first == second
    assert first.keys() == {"val/loss", "val/loss/a", "val/loss/b"}
    for name, part in (
        ("val/loss/a", batches[:2]),
        ("val/loss/b", batches[3:]),
        ("val/loss", batches[:2] + batches[3:]),
    ):
        assert first[name] == pytest.approx(mean_loss(part).item(), rel=1e-6)


def test_a_rank_that_has_no_label_in_validation_does_not_wait_for_those_of_others(tmp_path):
    expected = mean_loss(ragged_batches(5)[4:]).item()
    assert found(tmp_path, "ddp:late_labels") == pytest.approx([expected] * 2, rel=1e-6)


@pytest.mark.parametrize("strategy", ["fsdp2", "tp", "pp"])
def test_gradients_that_are_clipped_by_value_are_those_of_one_process(strategy, tmp_path):
    model, batches = tiny_llama(num_key_value_heads=2).double(), ragged_batches(4)
    optimizer, together = torch.optim.SGD(model.parameters(), lr=0.1), 2 if strategy == "fsdp2" else 1
    for start in range(0, 4, together):
        part = batches[start : start + together]
        if all((batch["labels"] == -100).all() for batch in part):
            continue
        optimizer.zero_grad()
        mean_loss(part, model).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.001)
        optimizer.step()
    weights = found(tmp_path, f"{strategy}:clipped")
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weights[name].double(), weight.detach(), rtol=1e-5, atol=1e-6, msg=name)


def test_stages_that_get_different_batches_in_a_later_epoch_are_refused(tmp_path):
    for result in found(tmp_path, "pp:drawn_apart"):
        assert "the ranks of a pipeline got different batches" in result["refusal"]
