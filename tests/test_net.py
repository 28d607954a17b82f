"""The net: what the commands of the README and the pages give, as it was recorded.

Each run is a command as a user types it, on a CPU, with a tiny model and data that this file makes. Its last losses and
the norm of each exported weight are compared with ``net.json``, to 1e-5: processors round differently. Two runs of one
test are compared to the bit. A commit that changes a value on purpose says so, and records it anew:

    RECORD_NET=1 python -m pytest tests/test_net.py
"""

import functools
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import export, summary, text_folder, train
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.net, pytest.mark.timeout(400)]

RECORDED = Path(__file__).with_name("net.json")
RELATIVE = {"bf16": 1e-2, "distillation": 1e-4}  # of others 1e-5; rounding to bfloat16 differs between processors

MODEL = [
    "model.config.hidden_size=32",
    "model.config.intermediate_size=48",
    "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=2",
]
# A rate at which every weight moves far, so that a wrong gradient shows in its norm.
STEPS = [
    "optimizer.lr=1e-2",
    "trainer.max_steps=20",
    "callbacks.checkpoint.every_n_train_steps=10",
    "callbacks.checkpoint.keep_all=true",
]
SHORT = [*STEPS, "data.batch_size=4", "~callbacks.sample_text"]
CAUSAL = [*MODEL, *SHORT, "data.vocab_size=400", "data.block_size=32"]
TEXT = ["data=text", "data.path=corpus", *CAUSAL]
CHAT = ["data=chat", "data.path=chats.jsonl", "data.chat_template=chatml", *CAUSAL]
PAIRS = ["module=preference", "data=preference", "data.path=pairs.jsonl", *CAUSAL]
ITEMS = [
    "module=recommender",
    "data=interactions",
    "data.path=items.csv",
    "data.batch_size=8",
    "data.max_length=8",
    "model.hidden_size=16",
    "model.num_layers=1",
    "model.dropout=0",
    *STEPS,
]
POLICY = ["module=policy", "data=rollouts", "data.path=rollouts.jsonl", "data.vocab_size=400", *MODEL, *SHORT]
TINY_T5 = [f"model.config.{name}=16" for name in ("d_model", "d_kv", "d_ff")]
TWO = ["trainer.devices=2", "trainer.accelerator=cpu"]

# One run for each module, loss, kind of data and strategy that the pages show.
RUNS: dict[str, list[str]] = {
    "chunked": TEXT,
    "standard": ["loss=standard", *TEXT],
    "bf16": ["precision=bf16-mixed", *TEXT],
    "own_loss_of_the_model": ["loss=model", *TEXT],
    "smoothing_and_z_loss": ["loss.label_smoothing=0.1", "loss.z_loss=1e-3", *TEXT],
    "accumulation_of_chats": ["trainer.accumulate_grad_batches=3", *CHAT],
    "packed_documents": ["data.packing=documents", *TEXT],
    "gemma2_softcap": ["model=gemma2", *TEXT],
    "lora": ["model=lora", *(word.replace("model.config", "model.model.config") for word in TEXT)],
    "masked": ["module=masked_lm", *TEXT],
    "seq2seq": [
        "experiment=reverse",
        "data.path=reversed.jsonl",
        "data.vocab_size=400",
        "data.batch_size=4",
        "trainer.max_steps=20",
        "trainer.val_check_interval=20",
        *TINY_T5,
    ],
    "dpo": PAIRS,
    "simpo": ["objective=simpo", *PAIRS],
    "policy": ["objective=grpo", *POLICY],
    "distillation": [
        "module=distillation",
        "teacher=llama",
        "teacher.seed=2",
        *(w.replace("model.", "teacher.") for w in MODEL),
        *TEXT,
    ],
    "recommender": ITEMS,
    "ddp": ["strategy=ddp", *TWO, *CHAT],
    "fsdp2": ["strategy=fsdp2", *TWO, "trainer.accumulate_grad_batches=2", *CHAT],
    "tp": ["strategy=tp", *TWO, *TEXT],
    "pp": ["strategy=pp", *TWO, *TEXT],
}
ON_TWO_RANKS = {"ddp", "fsdp2", "tp", "pp"}
# The gradient of a key's bias is zero but for rounding, and Adam makes steps of a whole rate of it.
NO_GRADIENT = {"model.backbone.layers.layers.0.self_attn.in_proj_bias"}
LOSSES = ("train/loss", "val/loss", "val/accuracy", "val/reward_margin", "val/ndcg_at_10", "val/kl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a corpus, chats of one to three turns, pairs of two kinds, rollouts and interactions."""
    folder = tmp_path_factory.mktemp("net")
    text_folder(folder)
    draw = random.Random(0)

    def write(name: str, records: list[dict[str, Any]]) -> None:
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))

    def turn(a: int, b: int) -> list[dict[str, str]]:
        return [
            {"role": "user", "content": f"What is {a} times {b}?"},
            {"role": "assistant", "content": f"{a} times {b} is {a * b}."},
        ]

    numbers = [(draw.randint(2, 99), draw.randint(2, 99)) for _ in range(120)]
    write("chats.jsonl", [{"messages": turn(a, b) * draw.randint(1, 3)} for a, b in numbers])
    write(
        "pairs.jsonl", [{"prompt": f"{a} x {b} = ", "chosen": f"{a * b}", "rejected": f"{a + b}!"} for a, b in numbers]
    )
    rollouts = [(n % 10, draw.randint(20, 39)) for n in range(80)]
    write(
        "rollouts.jsonl",
        [
            {"prompt_ids": [n], "completion_ids": [answer, 5], "reward": float(answer % 10 == n)}
            for n, answer in rollouts
        ],
    )
    starts = [(user, draw.randint(0, 39)) for user in range(60)]
    rows = [f"{user},{(start + 3 * t) % 40},{t}" for user, start in starts for t in range(6)]
    (folder / "items.csv").write_text("\n".join(["user,item,timestamp", *rows]))
    sums = [f"{a} plus {b} is {a + b}" for a, b in numbers]
    write("reversed.jsonl", [{"source": text, "target": " ".join(reversed(text.split()))} for text in sums])
    return folder


def run(folder: Path, out: str, *overrides: str, ranks: int = 1) -> dict[str, Any]:
    """Run a command and return what its summary tells of the metrics."""
    train(folder, *overrides, f"hydra.run.dir={out}", ranks=ranks)
    return summary(folder / out)["metrics"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: w for file in sorted(folder.glob("*.safetensors")) for name, w in load_file(file).items()}


@functools.cache
def fitted(folder: Path, name: str) -> dict[str, Any]:
    """Return the metrics of a run, which is made once for the tests that go on from it."""
    return run(folder, name, *RUNS[name], ranks=2 if name in ON_TWO_RANKS else 1)


@pytest.mark.parametrize("name", RUNS)
def test_a_command_gives_the_losses_and_weights_that_were_recorded(folder: Path, name: str) -> None:
    metrics = fitted(folder, name)
    found = {loss: metrics[loss] for loss in LOSSES if loss in metrics}
    exported = weights(folder / name / "exported")
    assert exported, "the run has exported its weights"
    found |= {weight: w.double().norm().item() for weight, w in exported.items() if weight not in NO_GRADIENT}
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if os.environ.get("RECORD_NET"):
        recorded[name] = found
        RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    # A norm near 0 is a sum of rounding errors: it is compared with the largest.
    largest = max(recorded[name].values())
    relative = RELATIVE.get(name, 1e-5)
    assert found == pytest.approx(recorded[name], rel=relative, abs=relative * 1e-2 * largest)


@pytest.mark.parametrize("name", ["chunked", "lora", "masked", "seq2seq", "dpo", "policy", "distillation"])
def test_memory_long_gives_the_losses_and_weights_that_were_recorded_without(folder: Path, name: str) -> None:
    metrics = run(folder, f"{name}_long", *RUNS[name], "memory=long", "memory.mlp_chunk_tokens=20")
    exported = weights(folder / f"{name}_long" / "exported")
    found = {loss: metrics[loss] for loss in LOSSES if loss in metrics}
    found |= {weight: w.double().norm().item() for weight, w in exported.items() if weight not in NO_GRADIENT}
    recorded = json.loads(RECORDED.read_text())[name]  # Twenty steps of this rate make rounding larger.
    assert found == pytest.approx(recorded, rel=1e-3, abs=1e-5 * max(recorded.values()))


@pytest.mark.parametrize("name", ["chunked", "accumulation_of_chats", "dpo", "recommender", "fsdp2"])
def test_a_run_resumed_at_its_half_ends_with_the_same_weights_to_the_bit(folder: Path, name: str) -> None:
    fitted(folder, name)
    half = f"ckpt_path={name}/checkpoints/step-000010.ckpt"
    run(folder, f"{name}_resumed", half, ranks=2 if name in ON_TWO_RANKS else 1)
    whole, resumed = (weights(folder / out / "exported") for out in (name, f"{name}_resumed"))
    assert whole.keys() == resumed.keys()
    for weight in whole:
        assert torch.equal(whole[weight], resumed[weight]), weight


def test_a_run_is_evaluated_generates_and_is_exported_by_its_path(folder: Path) -> None:
    trained = fitted(folder, "chunked")
    checkpoint = "ckpt_path=chunked/checkpoints/last.ckpt"
    validated = run(folder, "validated", "mode=validate", checkpoint)
    assert validated["val/loss"] == trained["val/loss"]
    greedy = [
        "mode=generate",
        checkpoint,
        "prompt='3 times 4 is'",
        "generate.temperature=0",
        "generate.max_new_tokens=8",
    ]
    said = [train(folder, *greedy) for _ in range(2)]
    assert said[0].output == said[1].output
    assert "3 times 4 is" in said[0].output
    export(folder, "chunked/checkpoints/last.ckpt", "again")
    for name, weight in weights(folder / "chunked" / "exported").items():
        assert torch.equal(weight, weights(folder / "again")[name]), name
