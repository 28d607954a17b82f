"""Preferences under every strategy, in two processes, against one process."""

import pytest
from ranks import each
from strategy_cases import assert_as_in_one_process, fit

CASES = {
    "dpo_model": {
        **dict.fromkeys(("ddp", "fsdp2", "tp"), ""),
        "pp": "strategy=pp divides one model, and a reference model cannot run beside it; give data with",
    },
    "dpo_stored": {"pp": ""},
    "dpo_packed": {"fsdp2": ""},
    "orpo_none": {"pp": ""},
    "simpo_none": {"ddp": ""},
    "kto_model": dict.fromkeys(("ddp", "fsdp2", "tp"), ""),
    "kto_stored": {
        "pp": "objective=kto runs the model a second time, on answers to other prompts, which strategy=pp does"
    },
}


@pytest.mark.slow
def test_two_processes_train_as_one_does_or_say_why_not(tmp_path):
    assert_as_in_one_process(tmp_path, CASES)


@pytest.mark.slow
def test_stored_sums_are_used_as_they_are_in_half_precision(tmp_path):
    assert each(fit, 2, [("watched", "fsdp2")], tmp_path, "bf16-true")["watched", "fsdp2"]["metrics"]
