"""``lit_fused.plan`` of rows that are divided over devices."""

from typing import Any

import pytest
import torch
from composed import composed
from transformers import LlamaConfig

import lit_fused
from lit_fused import ContextStrategy, FusedCausalLMModule, PlanOptions, UserError, from_config, reduce_memory
from lit_fused.app.commands.memory_plan import planned
from lit_fused.planning import Plan, Spread

DEVICES, TOKENS, LAYERS = 4, 2048, 3  # tokens of a device
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8}
ONE = TOKENS * 64 * 2  # bytes of all heads of a device's tokens


def predicted(strategy: Any, tokens: int, checkpointing: str = "none", compile: str = "none", **sizes: Any) -> Plan:
    config = LlamaConfig(**{"vocab_size": 8_000, "num_hidden_layers": LAYERS, **SIZES, **sizes})
    module = FusedCausalLMModule(reduce_memory(from_config(config), checkpointing=checkpointing), compile=compile)
    batch = {name: torch.empty(1, tokens, dtype=torch.long) for name in ("input_ids", "labels")}
    options = PlanOptions(compute_capability=9.0, strategy=strategy, devices=DEVICES, precision="bf16-true")
    return lit_fused.plan(options, module, batch)


@pytest.mark.parametrize(
    ("key_heads", "compile"), [(8, "none"), (4, "none"), (2, "none"), (8, "regional"), (2, "regional")]
)
def test_divided_rows_take_what_short_rows_take_and_the_buffers_of_the_exchange(key_heads: int, compile: str) -> None:
    numbers = 64 * TOKENS * DEVICES  # bytes, at most, of eight integers for each token of a whole row
    for checkpointing in ("none", "recompute"):
        divided, short = (
            predicted(strategy, tokens, checkpointing, compile, num_key_value_heads=key_heads)
            for strategy, tokens in ((ContextStrategy(), TOKENS * DEVICES), (Spread(shards=DEVICES), TOKENS))
        )
        for phase in divided.phases:
            found, of_short = divided.phases[phase], short.phases[phase]
            for name in ("weights", "gathered weights", "gradients", "optimizer state", "output head"):
                assert found[name] == pytest.approx(of_short[name], abs=4096), (phase, name)
        # Attention keeps its output for whole rows, and the projection behind it the same for the device's tokens. Two
        # key heads are repeated for four devices, as keys and as values.
        repeated = 2 * ONE * (4 - key_heads) / 8 if key_heads < 4 else 0
        held = LAYERS * (ONE + repeated) if checkpointing == "none" else 0
        grows = divided.phases["forward"].total() - short.phases["forward"].total()
        assert grows == pytest.approx(held, abs=numbers)
        # One layer at a time has what is sent and what is received of queries, keys and values, or of their gradients.
        grows = divided.phases["backward"].total() - short.phases["backward"].total()
        keys = max(key_heads, 4)
        assert held - numbers <= grows <= held + 2 * ONE * (8 + 2 * keys) / 8 + numbers


def test_a_run_is_planned_with_the_rows_and_the_heads_that_its_devices_divide() -> None:
    sizes = ("model.config.num_hidden_layers=1", "model.config.num_attention_heads=4", "data.block_size=256")
    runs = [
        planned(composed(*sizes, "strategy=context", *more), PlanOptions())
        for more in (("trainer.devices=4",), ("trainer.devices=4", "trainer.strategy.context_parallel_size=2"))
    ]
    assert [run["strategy"] for run in runs] == ["context on 4, rows in 4 parts", "context on 4, rows in 2 parts"]
    in_four, in_two = (run["phases_gib"]["forward"]["activations"] for run in runs)
    assert 1.7 * in_four < in_two < 2.1 * in_four
    packed = planned(composed(*sizes, "strategy=context", "trainer.devices=4", "data.packing=documents"), PlanOptions())
    assert packed["peak_gib"] == pytest.approx(runs[0]["peak_gib"])
    assert any("without a mask" in note for note in packed["notes"])


@pytest.mark.parametrize(
    ("strategy", "sizes", "message"),
    [
        (ContextStrategy(3), {}, "4 devices cannot be grouped by context_parallel_size=3"),
        (ContextStrategy(4), {"num_attention_heads": 2}, "context_parallel_size=4 does not divide the 2 heads"),
        (ContextStrategy(2, 4), {}, "devices cannot be grouped by data_parallel_size=4 times context_parallel_size=2"),
    ],
)
def test_what_a_run_would_refuse_a_plan_refuses(strategy: Any, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        predicted(strategy, 64, **sizes)
