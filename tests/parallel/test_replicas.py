"""``ReplicatedStrategy`` averages gradients where they lie: two ranks train as one process does, or as torch's DDP."""

from pathlib import Path
from typing import Any

import torch
from replicas_cases import CASES
from replicas_job import ON_GPUS, expected
from torchrun import run, torchrun

JOB = Path(__file__).parents[1] / "helpers" / "replicas_job.py"
AS_DDP = ("BFloat16", "Float16", "Float32")  # The mean of two ranks' numbers is rounded in the same places.
REFUSED = ("Other", "RecomputedLate", "Direct")
GROUPS = (1, 100, 10**9)  # bytes: one gradient, two or three, all of them


def results(folder: Path, cases: list[str]) -> dict[str, Any]:
    if ON_GPUS:  # A process that has looked for GPUs cannot be forked into ranks that use them.
        status, output = torchrun(JOB, 2, folder, *cases, timeout=240)
        assert not status, output
    else:
        run(JOB, 2, folder, *cases, timeout=240)
    return {case: torch.load(folder / f"{case.replace(':', '_')}.pt") for case in cases}


def test_two_ranks_train_as_one_process_whichever_gradients_are_there(tmp_path):
    exact = [case for case in CASES if case not in (*AS_DDP, *REFUSED)]
    of_groups = [f"Plain:ours:{size}" for size in GROUPS] + [f"OnOneRank:ours:{size}" for size in GROUPS]
    for name, found in results(tmp_path, [f"{case}:ours:1" for case in exact] + of_groups).items():
        assert "refusal" not in found, (name, found)
        for parameter, value in expected(name.split(":")[0]).items():
            torch.testing.assert_close(
                found["weights"][parameter], value, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )
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


def test_ranks_with_different_parameters_are_refused(tmp_path):
    refusal = results(tmp_path, ["Other:ours:1"])["Other:ours:1"]["refusal"]
    assert "rank 1 has other parameters than rank 0; build the same model on every rank" in refusal


def test_a_gradient_that_grows_while_it_is_exchanged_ends_the_fit(tmp_path):
    found = results(tmp_path, ["RecomputedLate:ours:1"])["RecomputedLate:ours:1"]
    assert "use_reentrant=False" in found["refusal"]


def test_a_backward_that_would_average_nothing_is_refused(tmp_path):
    assert "self.manual_backward(loss)" in results(tmp_path, ["Direct:ours:1"])["Direct:ours:1"]["refusal"]
