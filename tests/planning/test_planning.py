"""``lit_fused.plan``: what a step takes, predicted without memory, against real steps."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from composed import composed
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig

import lit_fused
from lit_fused import CrossEntropyLoss, LinearCrossEntropyLoss, PlanOptions, UserError, from_config, reduce_memory
from lit_fused.app.commands.memory_plan import plan, planned
from lit_fused.models.language_model import LanguageModel
from lit_fused.ops.backends import chunked
from lit_fused.planning import Plan, Spread
from lit_fused.planning.ledger import ACTIVATIONS, HEAD, CudaFunctions, MemoryLedger
from lit_fused.planning.planned_heads import GPU, heads_of, planned_backend

ROOT = Path(__file__).parents[2]
SHAPE = (4, 64)
ADAMW = partial(torch.optim.AdamW, lr=1e-3)
LIGHTNINGS = "lightning.pytorch.strategies.DDPStrategy"


def config(**changes) -> LlamaConfig:
    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaConfig(**(sizes | {"num_attention_heads": 4, "tie_word_embeddings": True} | changes))


def batch() -> dict[str, Tensor]:
    return {"input_ids": torch.zeros(SHAPE, dtype=torch.long), "labels": torch.zeros(SHAPE, dtype=torch.long)}


def optimizer_of(model: nn.Module, make: Callable = ADAMW) -> torch.optim.Optimizer:
    return make([p for p in model.parameters() if p.requires_grad])


def predicted(backbone: nn.Module, loss=None, make_optimizer: Callable = ADAMW, **options) -> Plan:
    model = LanguageModel(backbone, loss or LinearCrossEntropyLoss())
    return lit_fused.plan(PlanOptions(compute_capability=9.0, optimizer=make_optimizer, **options), model, batch())


def rounded(tensors: Iterator[Tensor] | list[Tensor]) -> int:
    """Bytes of the storages of these tensors, in the blocks of 512 that a GPU's allocator gives."""
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(-(-size // 512) * 512 for size in sizes.values())


@pytest.mark.parametrize("make_optimizer", [ADAMW, partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_weights_gradients_and_the_optimizers_state_are_those_of_a_real_step(make_optimizer):
    model = LanguageModel(AutoModelForCausalLM.from_config(config()), CrossEntropyLoss())
    optimizer = optimizer_of(model, make_optimizer)
    model(batch()).loss_sum.backward()
    optimizer.step()
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    found = predicted(from_config(config()), CrossEntropyLoss(), make_optimizer).phases["optimizer"]
    assert found["weights"] == rounded([*model.parameters(), *model.buffers()])
    assert found["gradients"] == rounded([p.grad for p in model.parameters() if p.grad is not None])
    assert found["optimizer state"] == rounded(states)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_what_is_alive_after_forward_is_what_autograd_saves_in_a_real_one(attention, precision):
    from lit_fused.planning.planned_step import _as_if_real, _empty, _replace_tensors

    def language_model() -> LanguageModel:
        backbone = AutoModelForCausalLM.from_config(config(), attn_implementation=attention)
        return LanguageModel(backbone, CrossEntropyLoss())

    real, saved = language_model(), []
    own = {p.untyped_storage().data_ptr() for p in [*real.parameters(), *real.buffers()]}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved.append(tensor)
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), autocast:
        real_loss = real(batch()).loss_sum  # its graph, and so what it saves, has to live until it is counted
    expected = rounded(saved)
    del real_loss

    fake, ledger = language_model(), MemoryLedger(512)
    with FakeTensorMode(allow_non_fake_inputs=True), ledger, CudaFunctions(), _as_if_real():
        _replace_tensors(fake, _empty)
        ledger.heading = ACTIVATIONS
        inputs = batch()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = fake(inputs).loss_sum
    alive = sum(size for name, size in ledger.live.items() if name != "weights")
    assert loss.requires_grad
    assert alive == pytest.approx(expected, rel=0.02)
    assert ledger.live[HEAD] >= 4 * SHAPE[0] * SHAPE[1] * 512


def test_frozen_weights_have_neither_gradient_nor_state():
    backbone = from_config(config())
    for name, p in backbone.named_parameters():
        p.requires_grad = "o_proj" in name
    found = predicted(backbone).phases["optimizer"]
    assert found["gradients"] == 2 * 64 * 64 * 4
    assert found["optimizer state"] == pytest.approx(2 * found["gradients"], abs=2 * 512)


@pytest.mark.slow
def test_checkpointing_takes_the_memory_of_one_layer_at_a_time():
    def activations(layers: int, checkpointing: str) -> int:
        backbone = reduce_memory(from_config(config(num_hidden_layers=layers)), checkpointing=checkpointing)
        return predicted(backbone).phases["forward"]["activations"]

    grows = activations(6, "recompute") - activations(4, "recompute")
    assert grows == pytest.approx(2 * SHAPE[0] * SHAPE[1] * 64 * 4, rel=0.01)  # one tensor for each layer
    assert activations(6, "none") - activations(4, "none") > 5 * grows
    assert activations(6, "offload") == activations(4, "offload")  # on the host


@pytest.mark.parametrize(
    ("size", "memory_gib", "chunk_mib"),
    [(136, 0, 448), (136, 24, 491), (136, 80, 1638), (136, 141, 2048), (1600, 80, 704), (1600, 141, 704)],
)
def test_a_chunk_is_what_a_gpu_is_fast_with_and_at_most_a_fiftieth_of_its_memory(size, memory_gib, chunk_mib):
    tokens, vocabulary = 16_384, 131_072  # no chunk is stored for a hidden size of up to 128
    with FakeTensorMode(), MemoryLedger(vocabulary) as ledger:
        hidden, weight = (torch.zeros(n, size, dtype=torch.bfloat16, requires_grad=True) for n in (tokens, vocabulary))
        before = sum(ledger.live.values())
        with heads_of(GPU((9, 0), 1024 * memory_gib), ledger):
            planned_backend(chunked, ledger)(hidden, weight, torch.zeros(tokens, dtype=torch.int64))
        found_mib = (sum(ledger.peak.values()) - before) / 2**20
    gradients_mib = 2 * size * (tokens + vocabulary) / 2**20
    assert 0.8 * chunk_mib < found_mib - gradients_mib < 1.1 * chunk_mib


@pytest.mark.slow
def test_fsdp_divides_what_it_shards_and_nothing_else():
    whole, divided = (predicted(from_config(config()), strategy=Spread(shards=n)) for n in (1, 4))
    for component in ("weights", "gradients", "optimizer state"):
        of_one = whole.phases["optimizer"][component]
        assert divided.phases["optimizer"][component] == pytest.approx(of_one / 4, rel=0.05)
    of_one, of_four = (p.phases["forward"] for p in (whole, divided))
    assert of_four["activations"] == of_one["activations"]
    assert of_four["gathered weights"] > 512 * 64 * 4  # the root's embedding
    kept = predicted(from_config(config()), strategy=Spread(shards=4, whole_units=True)).phases["forward"]
    assert kept["gathered weights"] == pytest.approx(of_one["weights"], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "name", "times"),
    [
        (["strategy=auto"], "one device", 1),
        (["trainer.devices=2"], "ddp on 2", 2),
        (["strategy=ddp", "trainer.devices=2"], "ddp on 2", 1),
        (["strategy=ddp", "trainer.devices=2", f"trainer.strategy._target_={LIGHTNINGS}"], "ddp on 2", 2),
        (["strategy=fsdp2", "trainer.devices=2", "trainer.num_nodes=2"], "fsdp2 on 4", 0.25),
    ],
)
def test_a_plan_is_that_of_the_runs_strategy(overrides, name, times):
    found = planned(composed("model.config.num_hidden_layers=1", *overrides), PlanOptions())
    whole = found["trained"] * 4 / 2**30
    assert found["strategy"] == name
    assert found["phases_gib"]["optimizer"]["gradients"] == pytest.approx(times * whole, rel=0.02)


# PeakMemoryMonitor's figures of one NVIDIA H200, docs/evidence/qwen3_memory.md and devices.md.
MEASURED = [
    (["loss=chunked"], 44.952),
    (["loss=standard"], 70.885),
    (["loss=chunked", "compile=regional"], 30.1),
    (["loss=standard", "compile=auto"], 56.0),
    (["loss=torch_compile"], 47.991),
    (["loss=liger"], 44.030),
    (["loss=cce"], 43.646),
    (["loss=chunked", "model=qwen3_1_7b", "data.batch_size=4"], 53.620),
    (["loss=chunked", "strategy=fsdp2", "trainer.devices=2", "trainer.strategy.reshard_after_forward=true"], 42.258),
    (["loss=chunked", "strategy=fsdp2", "trainer.devices=2"], 44.075),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "gib"), MEASURED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_plan_is_within_one_per_cent_of_what_a_gpu_took(overrides, gib):
    cfg = composed("experiment=qwen3_memory", *overrides)
    options = PlanOptions(compute_capability=9.0, memory_gib=139.8)
    assert planned(cfg, options)["peak_gib"] == pytest.approx(gib, rel=0.01)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy=tp", "trainer.devices=2"], "does not know what strategy=FSDP2Strategy takes"),
        (["strategy=pp", "trainer.devices=2"], "does not know what strategy=PipelineStrategy"),
        (["experiment=reverse", "data.path=a.jsonl", "~data.block_size"], "block_size"),
        (["precision=64-true"], "knows precision=32-true, bf16-mixed"),
        (["trainer.devices=auto"], "needs trainer.devices as a number, got 'auto'"),
    ],
)
def test_what_a_plan_does_not_know_is_refused_by_name(overrides, message):
    cfg = composed(*overrides)
    with pytest.raises((UserError, Exception), match=message):
        planned(cfg, PlanOptions(**{k: v for k, v in cfg.plan.items() if k != "_target_"}))


class Plain(nn.Module):
    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.embed, self.head, self.asks = nn.Embedding(512, 64), nn.Linear(64, 512), asks

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden_states = self.embed(input_ids)
        return hidden_states[:, : len(input_ids.nonzero())] if self.asks else hidden_states


def test_a_plain_module_is_planned_and_one_that_asks_for_numbers_is_refused():
    found = predicted(Plain(asks=False)).phases["optimizer"]
    assert found["gradients"] == 2 * 512 * 64 * 4 + 512 * 4
    with pytest.raises(UserError, match="Plain cannot be planned.*nonzero.*callbacks=measure"):
        predicted(Plain(asks=True))


# Runs a command, and says what its process took: that of this process would be of all tests' children.
MEASURED_RUN = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:])
print("took", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20)
sys.exit(done.returncode)
"""


@pytest.mark.slow
def test_the_command_plans_a_large_model_in_little_memory_and_leaves_a_file(tmp_path):
    size = ["experiment=qwen3_memory", "model=qwen3_1_7b", "model.config.num_hidden_layers=2"]
    command = [sys.executable, "train.py", "mode=plan", *size, "plan.memory_gib=80", f"hydra.run.dir={tmp_path}/run"]
    measured = [sys.executable, "-c", MEASURED_RUN, *command]
    done = subprocess.run(measured, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "gradients" in done.stdout
    assert "the largest batch: " in done.stdout
    result = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert result["fits"]
    forward = result["phases_gib"]["forward"]
    assert forward["total"] == pytest.approx(sum(size for name, size in forward.items() if name != "total"))
    assert forward["weights"] > 1.5
    assert float(done.stdout.split("took")[1]) < 1.5, "the weights have been built"


@pytest.mark.slow
def test_the_largest_batch_is_the_largest(tmp_path):
    cfg = composed("mode=plan", "plan.memory_gib=1.5", f"output_dir={tmp_path}")
    plan(cfg)
    found = json.loads((tmp_path / "plan.json").read_text())
    cfg.data.batch_size = found["largest_batch_size"]
    assert planned(cfg, PlanOptions())["peak_gib"] <= found["usable_gib"]
    cfg.data.batch_size += 1
    assert planned(cfg, PlanOptions())["peak_gib"] > found["usable_gib"]


PREFERENCES = ("module=preference", "data=preference", "data.path=pairs.jsonl", "data.block_size=64")


@pytest.mark.parametrize(
    ("overrides", "whole"),
    [
        ((), 1),
        (("strategy=fsdp2", "trainer.devices=2"), 0.5),
    ],
)
def test_a_reference_takes_its_weights_in_every_phase_and_neither_gradients_nor_state(overrides, whole):
    beside, stored = (
        planned(composed(*PREFERENCES, "model.config.num_hidden_layers=1", *overrides, *more), PlanOptions())
        for more in ((), ("module.reference=stored",))
    )
    weights = whole * beside["parameters"] * 4 / 2**30
    for phase, found in beside["phases_gib"].items():
        assert found.pop("frozen model") == pytest.approx(weights, rel=0.01), phase
    for name in ("weights", "gradients", "optimizer state"):
        assert beside["phases_gib"]["optimizer"][name] == stored["phases_gib"]["optimizer"][name]
    assert beside["between_steps_gib"] - stored["between_steps_gib"] == pytest.approx(weights, rel=0.01)


@pytest.mark.slow
def test_mlps_in_chunks_take_the_memory_of_one_chunk_at_a_time():
    def peak(wide: int, tokens: int | None) -> int:
        backbone = from_config(config(num_hidden_layers=4, intermediate_size=wide))
        reduce_memory(backbone, checkpointing="offload", mlp_chunk_tokens=tokens)
        phase = predicted(backbone).phases["backward"]
        return phase["activations"] + phase["temporary"]

    gradients = 2 * 3 * 64 * (1024 - 128) * 4  # of the three matrices of a layer: the sum, and a chunk's
    whole, chunked_growth = (peak(1024, tokens) - peak(128, tokens) for tokens in (None, 16))
    assert chunked_growth - gradients < whole / 8
