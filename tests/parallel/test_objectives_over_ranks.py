"""Objectives, and models of which a batch needs only parts, under every strategy in two processes: as in one."""

import pytest
from ranks import each
from strategy_cases import assert_as_in_one_process, fit

BESIDE = "strategy=pp divides one model, and a {} model cannot run beside it"
REFERENCE, TEACHER = BESIDE.format("reference"), BESIDE.format("teacher") + "; store its probabilities"
PROMPTS = "objective=kto runs the model a second time, on answers to other prompts, which strategy=pp does"
WHOLE_HEAD = "needs the output layer whole on each rank; choose gather_head=true"


def under(strategies: str, **refused: str) -> dict[str, str]:
    """Return strategies that train, and words of those that refuse."""
    return dict.fromkeys(strategies.split(), "") | refused


CASES = {
    "weighted": under("ddp fsdp2 tp pp context fsdp2_rows"),
    "policy": under("ddp fsdp2 tp pp context"),
    "policy_beside": under("ddp fsdp2 tp context fsdp2_rows", pp=REFERENCE),
    "rloo": under("ddp fsdp2 context"),
    "ppo": under("ddp fsdp2 context"),
    "distilled": under("ddp fsdp2 tp context", pp=TEACHER, fsdp2_rows=WHOLE_HEAD),
    "drafted": under("ddp fsdp2 tp context", pp=TEACHER),
    "stored": under("ddp fsdp2 tp pp context fsdp2_rows"),
    "stored_hidden": under("ddp fsdp2 tp pp context"),
    "frozen": under("context"),
    "dpo_model": under("ddp fsdp2 tp context fsdp2_rows", pp=REFERENCE + "; give data with"),
    "dpo_stored": under("pp context"),
    "dpo_packed": under("fsdp2 context"),
    "orpo_none": under("pp context"),
    "simpo_none": under("ddp context"),
    "kto_model": under("ddp fsdp2 tp context fsdp2_rows"),
    "kto_stored": under("", pp=PROMPTS),
    "packed_llama": under("context"),
    "packed_gpt_oss": under("context"),
    "llava_everywhere": under("ddp fsdp2"),
    "llava_on_one_rank": under("ddp"),
    "qwen_vl_on_one_rank": under("ddp"),
    "gemma3_everywhere": under("fsdp2"),
    "unused": under("ddp"),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "tp", "pp", "context", "fsdp2_rows"])
def test_every_objective_trains_as_in_one_process_or_says_why_not(strategy, tmp_path):
    cases = {case: {strategy: said[strategy]} for case, said in CASES.items() if strategy in said}
    assert_as_in_one_process(tmp_path, cases)


@pytest.mark.slow
def test_stored_sums_are_used_as_they_are_in_half_precision(tmp_path):
    assert each(fit, 2, [("watched", "fsdp2")], tmp_path, "bf16-true")["watched", "fsdp2"]["metrics"]
