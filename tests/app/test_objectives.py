"""Modules of other objectives as a user types them, on a CPU and on data that the repository makes: what they learn."""

import json
import math
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, summary, train

pytestmark = pytest.mark.slow

SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
MODEL = [f"model.config.{name}={value}" for name, value in (SIZE | {"num_key_value_heads": 2}).items()]
SHORT = [
    *MODEL,
    "trainer.max_steps=40",
    "data.vocab_size=512",
    "data.batch_size=8",
    "~callbacks.export",
    "~callbacks.sample_text",
]
PAGE = (ROOT / "docs" / "preference.md").read_text()
DOCUMENTED = re.findall(r"^python train.py (module=preference .*1e-3)$", PAGE, re.MULTILINE)


def metrics_of(folder: Path, *overrides: str) -> dict[str, Any]:
    out = Path(tempfile.mkdtemp(dir=folder))
    train(folder, *overrides, f"hydra.run.dir={out}")
    return summary(out)["metrics"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with pairs that a few steps learn, by how their answers end, and the same answers one by one."""
    folder = tmp_path_factory.mktemp("objectives")
    pairs = [{"prompt": f"{n} plus {n} is", "chosen": f" {n}.", "rejected": f" {n + 1}, I think."} for n in range(200)]
    (folder / "preferences").mkdir()
    (folder / "preferences" / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    single = [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair in pairs
        for side in ("chosen", "rejected")
    ]
    (folder / "single.jsonl").write_text("".join(json.dumps(record) + "\n" for record in single))
    return folder


def test_the_documented_commands_learn_to_prefer(folder: Path) -> None:
    assert [re.search(r"objective=\w+|$", words)[0] for words in DOCUMENTED] == ["", "objective=simpo"]  # type: ignore[index]
    for words in DOCUMENTED:
        found = metrics_of(folder, *words.split(), *SHORT, "data.block_size=64")
        assert found["val/reward_margin"] > 0.2, words
        assert found["val/reward_accuracy"] > 0.9, words
    kto = [word.replace("preferences/pairs", "single") for word in DOCUMENTED[0].split()]
    found = metrics_of(folder, *kto, "objective=kto", *SHORT)
    assert found["val/reward_chosen"] > 0.03 > -0.1 > found["val/reward_rejected"]


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_stored_reference_learns_what_the_copy_beside_it_learns(folder: Path, objective: str) -> None:
    words = [*DOCUMENTED[0].split(), *SHORT]
    if objective == "kto":
        words = [*(word.replace("preferences/pairs", "single") for word in words), "objective=kto"]
    beside = metrics_of(folder, *words)
    train(folder, "mode=score", "score.path=reference.parquet", *words)
    stored = metrics_of(folder, *words, "module.reference=stored", "data.scores=reference.parquet")
    of_objective = ("val/kl",) if objective == "kto" else ("val/reward_margin", "val/reward_accuracy")
    for name in ("val/loss", "val/reward_chosen", *of_objective):
        assert stored[name] == pytest.approx(beside[name], rel=1e-4), name


def test_a_policy_learns_the_rewarded_answers(folder: Path) -> None:
    draw = random.Random(0)
    rollouts = [
        {"prompt_ids": [10 + n], "completion_ids": [answer, 5], "reward": float(answer == 20 + n)}
        for n in range(4)
        for answer in (20 + n, *(draw.randint(30, 40) for _ in range(3)))
    ]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rollouts))
    of_policy = ["module=policy", "objective=reinforce", "data=rollouts", "data.path=rollouts.jsonl"]
    found = metrics_of(folder, *of_policy, "optimizer.lr=1e-3", *[word for word in SHORT if "vocab" not in word])
    assert found["val/loss"] < 0.9 * 2 / 4 * math.log(16384)  # of one rewarded answer in four, of two tokens
