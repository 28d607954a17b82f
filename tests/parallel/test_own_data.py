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


@pytest.mark.parametrize(("strategy", "refused"), [("ddp", ["train"]), ("fsdp2", ["train", "val", "predict"])])
def test_ranks_that_would_wait_for_others_that_have_no_batch_left_are_refused(strategy, refused, tmp_path):
    for calls in found(tmp_path, f"{strategy}:unlike_lengths"):
        refusals = [result["refusal"] for result in calls if result]
        assert len(refusals) == len(refused)
        for refusal, stage in zip(refusals, refused, strict=True):
            assert "(rank 0 3; rank 1 2)" in refusal
            assert f"limit_{stage}_batches=" in refusal


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_data_of_unknown_length_that_end_on_one_rank_alone_are_refused_with_its_last_batch(strategy, tmp_path):
    for equal, longer, *limited in found(tmp_path, f"{strategy}:streams"):
        assert equal is None
        assert "data of some ranks have ended and those of others go on" in longer["refusal"]
        assert limited == [None, None]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "tp", "pp"])
def test_ranks_whose_data_end_before_those_of_others_or_never_begin_are_refused_in_each_stage(strategy, tmp_path):
    first, second = found(tmp_path, f"{strategy}:ends")
    assert first == second
    for name, (empty, *streams, equal) in first.items():
        assert "a loader has no batch on rank 1" in empty
        assert equal == ""
        for refusal in streams:  # Copies of a model evaluate what each has.
            assert ("data of some ranks have ended" in refusal) == (strategy != "ddp" or name == "fit")


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


def test_the_search_for_anomalies_is_refused_under_tensor_parallelism_alone(tmp_path):
    for result in found(tmp_path, "tp:anomalies"):
        assert "leave detect_anomaly=True out" in result["refusal"]
    assert found(tmp_path, "fsdp2:anomalies") == found(tmp_path, "pp:anomalies") == [None, None]
