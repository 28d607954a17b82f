"""reduce_memory in real runs: strategies, modules, the command, checkpoints."""

from typing import Any

import pytest
import torch
from commands import SYNTHETIC, TINY_MODEL, summary, train
from parallel_cases import Case
from parallel_fits import fit, judge, launch, resume

STRATEGIES = [
    *(Case(strategy, "llama_tied", reduced=True) for strategy in ("single", "ddp", "fsdp2", "fsdp2_kept", "tp", "pp")),
    *(Case(strategy, "qwen3", reduced=True) for strategy in ("fsdp2_tp", "context", "pp_fsdp2", "pp_interleaved")),
    *(Case(strategy, "gemma2", precision="bf16-mixed", reduced=True) for strategy in ("ddp", "fsdp2")),
]
COMPILED = [Case(strategy, "llama", compile="regional", reduced=True) for strategy in ("ddp", "fsdp2", "pp")]


@pytest.mark.slow
def test_a_run_with_memory_long_is_resumed_with_any_other_memory(tmp_path):
    run = [*TINY_MODEL, *SYNTHETIC, "trainer.accelerator=cpu", "~callbacks.sample_text", "hydra.run.dir=run"]
    first = train(tmp_path, *run, "memory=long", "memory.mlp_chunk_tokens=20", "trainer.max_steps=2")
    assert "The MLPs of 1 of 1 layers compute in chunks of tokens" in first.plain
    train(tmp_path, "ckpt_path=run", "trainer.max_steps=3", "memory=none", "hydra.run.dir=more")
    assert summary(tmp_path / "more")["steps"] == 3


def wrong(cases: list[Case], folder: Any) -> dict[str, str]:
    found = {}
    for case, result in launch(fit, cases, folder, timeout=800).items():
        try:
            judge(case, result, folder)
        except AssertionError as error:
            found[str(case)] = str(error)
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_strategy_equals_one_process(tmp_path):
    assert not wrong(STRATEGIES, tmp_path)


@pytest.mark.slow
@pytest.mark.needs_compiler
@pytest.mark.timeout(900)
def test_strategies_with_compiled_layers_equal_one_process(tmp_path):
    assert not wrong(COMPILED, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_resumed_run_ends_where_one_run_does(tmp_path):
    cases = [Case(strategy, "qwen3", reduced=True) for strategy in ("ddp", "fsdp2")]
    for case, found in launch(resume, cases, tmp_path, timeout=800).items():
        for name, weight in found["at once"].items():
            assert torch.equal(found["resumed"][name], weight), (case, name)
