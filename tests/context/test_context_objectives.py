"""Losses of whole answers and completions, with models beside the trained one, where ranks divide rows."""

import pytest
from strategy_cases import assert_as_in_one_process

CASES = (
    *("dpo_model", "dpo_stored", "dpo_packed", "orpo_none", "simpo_none", "kto_model"),
    *("policy", "policy_beside", "rloo", "ppo"),
    *("distilled", "drafted", "stored", "stored_hidden", "frozen", "weighted", "packed_llama", "packed_gpt_oss"),
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_objective_trains_as_in_one_process(tmp_path):
    assert_as_in_one_process(tmp_path, {case: {"context": ""} for case in CASES})
