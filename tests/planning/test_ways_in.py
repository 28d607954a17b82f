"""``lit_fused.plan`` of Lightning's trainer, of transformers' arguments and of TRL's: the numbers of ``mode=plan``."""

import warnings
from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

import lightning as L
import pytest
import torch
from composed import composed
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.kto_config import KTOConfig
from trl.trainer.sft_config import SFTConfig

import lit_fused
from lit_fused import FusedCausalLMModule, LinearCrossEntropyLoss, PlanOptions, UserError
from lit_fused.app.commands.memory_plan import planned
from lit_fused.planning.planned_run import Plan

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MODEL = ["model=llama", *(f"model.config.{name}={size}" for name, size in SIZES.items())]
ROWS, TOKENS = 4, 128
RUN = [
    f"data.batch_size={ROWS}",
    f"data.block_size={TOKENS}",
    "precision=bf16-mixed",
    "trainer.accumulate_grad_batches=2",
]
TEXT = ["data=synthetic"]
PAIRS = ["module=preference", "data=preference", "data.path=pairs.jsonl"]
ROLLOUTS = ["module=policy", "data=rollouts", "data.path=rollouts.jsonl"]
ARGUMENTS: dict[str, Any] = {
    "output_dir": "out",
    "per_device_train_batch_size": ROWS,
    "gradient_accumulation_steps": 2,
    "bf16": True,
    "use_cpu": True,
    "gradient_checkpointing": False,
}


def model() -> Any:
    """A model without weights, as a laptop plans one that it cannot hold."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG)


def of_command(*overrides: str) -> dict[str, Any]:
    found = planned(composed(*MODEL, *RUN, *overrides), PlanOptions())
    return {phase: {n: s for n, s in sizes.items() if n != "total"} for phase, sizes in found["phases_gib"].items()}


def in_gib(plan: lit_fused.planning.Plan) -> dict[str, Any]:
    return {phase: {name: size / 2**30 for name, size in peak.items()} for phase, peak in plan.phases.items()}


def the_config() -> LlamaConfig:
    config = composed(*MODEL, *RUN, *TEXT).model.config
    return LlamaConfig(**{name: value for name, value in config.items() if name != "_target_"})


CONFIG = the_config()


@pytest.mark.parametrize(
    ("kind", "options", "sizes", "overrides"),
    [
        (TrainingArguments, {}, {"sequence_length": TOKENS}, TEXT),
        (TrainingArguments, {"fsdp": True}, {"sequence_length": TOKENS, "devices": 2}, [*TEXT, "strategy=fsdp2"]),
        (SFTConfig, {"max_length": TOKENS, "packing": True}, {}, TEXT),
        (DPOConfig, {"max_length": TOKENS}, {}, PAIRS),
        (DPOConfig, {"max_length": TOKENS, "precompute_ref_log_probs": True}, {}, [*PAIRS, "module.reference=stored"]),
        (GRPOConfig, {"num_generations": 4}, {"sequence_length": TOKENS}, ROLLOUTS),
    ],
)
def test_arguments_have_the_numbers_of_the_command_for_the_same_run(kind, options, sizes, overrides):
    found = lit_fused.plan(kind(**(ARGUMENTS | options)), model(), **sizes)
    more = ["trainer.devices=2", "trainer.strategy.reduce_every_micro_batch=false"] if options.get("fsdp") else []
    more += ["trainer.strategy.reshard_after_forward=true"] * bool(more)
    assert in_gib(found) == of_command(*overrides, *more)


def test_lightnings_trainer_has_the_numbers_of_the_command_for_the_same_run():
    settings: Any = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
    trainer = L.Trainer(strategy="lit_fused_fsdp2", precision="bf16-mixed", accumulate_grad_batches=2, **settings)
    found = lit_fused.plan(
        trainer, FusedCausalLMModule(model(), compile="auto"), batch_size=ROWS, sequence_length=TOKENS
    )
    assert in_gib(found) == of_command(*TEXT, "strategy=fsdp2", "trainer.devices=2")


def test_checkpointing_of_the_arguments_is_planned_and_the_model_is_left_as_it_was():
    backbone, found = lit_fused.fuse(model()), {}
    for on in (False, True):
        settings: Any = ARGUMENTS | {"gradient_checkpointing": on}
        found[on] = lit_fused.plan(TrainingArguments(**settings), backbone, sequence_length=512)
    kept = {on: plan.phases["forward"]["activations"] for on, plan in found.items()}
    assert kept[True] < kept[False] / 2
    assert not backbone.is_gradient_checkpointing
    assert all(p.is_meta for p in backbone.parameters())


@pytest.mark.parametrize("kind", [TrainingArguments, SFTConfig])
def test_label_smoothing_of_the_arguments_is_planned_with_the_logits_that_the_trainer_builds(kind):
    def plan(factor: float) -> Any:
        settings: Any = ARGUMENTS | {"label_smoothing_factor": factor}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TRL's, that it is deprecated
            return lit_fused.plan(kind(**settings), model(), sequence_length=TOKENS, packing="stream")

    of_logits = 4 * ROWS * (TOKENS - 1) * CONFIG.vocab_size  # bytes, float32
    smoothed, fused = plan(0.1).phases, plan(0.0).phases
    more = {phase: smoothed[phase].total() - fused[phase].total() for phase in ("forward", "backward")}
    assert 2 * of_logits < more["forward"] < 4 * of_logits
    assert 2 * of_logits < more["backward"] < 6 * of_logits


def test_a_plan_is_said_before_the_planner_looks_for_what_fits():
    found = lit_fused.plan(PlanOptions(), model(), batch_size=ROWS, sequence_length=TOKENS, memory_gib=1)
    found.predict = lambda rows, length: pytest.fail("not yet")
    table, *_, fits = islice(found.lines(), 3)
    assert "weights" in table
    assert fits == "of 1.0 GiB: fits"


@pytest.mark.slow
def test_the_largest_batch_and_the_longest_sequence_are_printed_and_the_next_ones_do_not_fit():
    arguments = TrainingArguments(**ARGUMENTS)
    sizes: Any = {"memory_gib": 0.25, "loss": LinearCrossEntropyLoss(chunk_size=64)}
    found = lit_fused.plan(arguments, model(), sequence_length=TOKENS, **sizes)
    assert f"the largest batch: {found.largest_batch_size} rows of 128 tokens" in str(found)
    assert f"the longest sequence: {found.longest_sequence:,} tokens in 4 rows" in str(found)
    assert found.largest_batch_size > ROWS
    for rows, length in ((found.largest_batch_size, TOKENS), (ROWS, found.longest_sequence)):
        assert lit_fused.plan(arguments, model(), batch_size=rows, sequence_length=length, **sizes).fits
    assert not lit_fused.plan(
        arguments, model(), batch_size=found.largest_batch_size + 1, sequence_length=TOKENS, **sizes
    ).fits
    longest = found.longest_sequence
    assert (
        longest == CONFIG.max_position_embeddings
        or not lit_fused.plan(arguments, model(), sequence_length=longest + 128, **sizes).fits
    )


GROWTH = {
    "linear": lambda rows: 0.01 * rows,
    "slowly": lambda rows: 0.4 * rows**0.6,
    "fast": lambda rows: 1e-6 * rows**2,
    "in chunks": lambda rows: 0.01 * rows + 3 * (rows // 100 % 2),
}


@pytest.mark.parametrize("growth", GROWTH)
@pytest.mark.parametrize("rows", [1, 900, 3000])
def test_what_fits_is_found_in_few_plans_that_are_not_much_larger(growth, rows):
    def predict(rows: int, _: int) -> Plan:
        tried.append(rows)
        return Plan({"backward": Counter(activations=int(2**30 * GROWTH[growth](rows)))}, 0, 0, between_steps=0)

    tried: list[int] = []
    found = replace(predict(rows, 128), batch_size=rows, sequence_length=128, device_gib=16, predict=predict)
    most = found.largest_batch_size
    next_one = most + max(most // 256, 1)
    assert replace(found, phases=predict(most, 128).phases).fits
    assert not replace(found, phases=predict(next_one, 128).phases).fits
    assert len(tried) < 15
    assert max(tried) <= max(rows, 2.5 * most)


def test_one_row_is_said_to_be_one_row():
    sizes: Any = {"batch_size": 1, "sequence_length": 24, "memory_gib": 0.01}
    said = str(lit_fused.plan(TrainingArguments(**ARGUMENTS), model(), **sizes))
    assert "the largest batch: 0 rows of 24 tokens" in said
    assert "the longest sequence: 0 tokens in 1 row" in said.splitlines()


def test_a_trainer_of_trl_that_is_unknown_and_a_missing_length_are_refused():
    with pytest.raises(UserError, match=r"does not know what TRL's trainer of KTOConfig takes"):
        lit_fused.plan(KTOConfig(**ARGUMENTS), model())
    with pytest.raises(UserError, match="batch_size=4 and sequence_length=None; give both"):
        lit_fused.plan(TrainingArguments(**ARGUMENTS), model())
