"""``ReplicatedStrategy`` averages gradients where they lie: two ranks train as one process does, or as torch's DDP."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from replicas_cases import CASES, STEPS
from replicas_job import ON_GPUS, expected
from tiny_models import tiny_model
from torchrun import run, torchrun

from lit_fused import LanguageModel, LinearCrossEntropyLoss, UserError
from lit_fused.parallel import ReplicatedStrategy, placement_of

JOB = Path(__file__).parents[1] / "helpers" / "replicas_job.py"
AS_DDP = ("BFloat16", "Float16", "Float32")  # The mean of two ranks' numbers is rounded in the same places.
REFUSED = ("Other", "Late", "RecomputedLate")
GROUPS = (1, 100, 10**9)  # bytes: one gradient, two or three, all of them


def results(folder: Path, cases: list[str]) -> dict[str, Any]:
    if ON_GPUS:  # A process that has looked for GPUs cannot be forked into ranks that use them.
        status, output = torchrun(JOB, 2, folder, *cases, timeout=240)
        assert not status, output
    else:
        run(JOB, 2, folder, *cases, timeout=240)
    return {case: torch.load(folder / f"{case.replace(':', '_')}.pt") for case in cases}


def test_two_ranks_train_as_one_process_whichever_gradients_are_there(tmp_path):
    without = (*AS_DDP, *REFUSED, *(("Sparse", "SparseByHand") if ON_GPUS else ()))
    exact = [case for case in CASES if case not in without]
    of_groups = [f"Plain:ours:{size}" for size in GROUPS] + [f"OnOneRank:ours:{size}" for size in GROUPS]
    for name, found in results(tmp_path, [f"{case}:ours:1" for case in exact] + of_groups).items():
        assert "refusal" not in found, (name, found)
        for parameter, value in expected(name.split(":")[0]).items():
            torch.testing.assert_close(
                found["weights"][parameter], value, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )
        if name in ("Plain:ours:1", "Accumulated:ours:1"):
            assert found["exchanges"] == STEPS, name
        first, second = found["ranks"]
        assert all(torch.equal(first[parameter], second[parameter]) for parameter in first), name


def test_numbers_of_any_dtype_are_those_of_torchs_ddp(tmp_path):
    strategies = ("ours", "ddp_find_unused_parameters_true")
    found = results(tmp_path, [f"{case}:{strategy}" for case in AS_DDP for strategy in strategies])
    for case in AS_DDP:
        ours, theirs = (found[f"{case}:{strategy}"]["weights"] for strategy in strategies)
        assert ours.keys() == theirs.keys()
        for name in ours:
            if not name.startswith("unused"):  # To DDP it has a gradient of zeros, and decays.
                assert torch.equal(ours[name], theirs[name]), (case, name)


def test_what_cannot_be_exchanged_is_refused_by_its_name(tmp_path):
    refusals = {
        "Other": (
            "rank 1 has other parameters than rank 0, or trains others (extra.bias, extra.weight); build the same "
            "model on every rank"
        ),
        "Late": (
            "an optimiser has late.weight, which was no parameter of the model when the strategy was set up, and ranks "
            "would train it apart; make it in __init__ or configure_model()"
        ),
        "RecomputedLate": (
            "second.bias has a gradient from reentrant checkpointing after one from without, which is being exchanged; "
            "choose use_reentrant=False"
        ),
    }
    assert {*refusals} == {*REFUSED}
    for case, refusal in refusals.items():
        assert results(tmp_path, [f"{case}:ours:1"])[f"{case}:ours:1"]["refusal"] == refusal


@pytest.mark.parametrize("kind", [ReplicatedStrategy, DDPStrategy])
def test_sparse_gradients_on_gpus_are_refused_before_the_first_step(kind, monkeypatch):
    monkeypatch.setattr(kind, "root_device", torch.device("cuda"))
    backbone = tiny_model("llama")
    embedding: Any = backbone.get_input_embeddings()
    embedding.sparse = True
    model, placement = LanguageModel(backbone, LinearCrossEntropyLoss()), placement_of(kind())
    with pytest.raises(UserError, match="gradients of backbone.*embed_tokens are sparse.*set its sparse=False"):
        placement.check(model, training=True, compile="none")
    placement.check(model, training=False, compile="none")
