"""Fine-tuning as a command gives it: its rate, its epochs, its validations, and what it says before it trains."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest
from commands import SYNTHETIC, TINY_MODEL, summary, text_folder, train
from composed import composed
from omegaconf import OmegaConf
from pretrained_folders import pretrained

from lit_fused.app.defaults import default_epochs, open_values

PRETRAINED = ["model=pretrained", "model.path=some/model"]
LORA = ["model=lora", "model@model.model=pretrained", "model.model.path=some/model"]
CHATS = ["data=chat", "data.path=chats.jsonl"]
PREFERENCES = ["module=preference", "data=preference", "data.path=pairs.jsonl"]
ROLLOUTS = ["module=policy", "data=rollouts", "data.path=rollouts.jsonl"]


def rate_of(*overrides: str) -> float:
    return composed(*overrides).optimizer.lr


@pytest.mark.parametrize(
    ("overrides", "rate"),
    [
        ([], 1e-3),
        (["model=gemma2", "data=text", "data.path=texts"], 1e-3),
        ([*PRETRAINED, *CHATS], 2e-5),
        ([*PRETRAINED, "data=text", "data.path=texts"], 2e-5),
        (["module=masked_lm", *PRETRAINED], 2e-5),
        (["module=distillation", "teacher=pretrained", "teacher.path=some/teacher"], 1e-3),  # the student is new
        ([*LORA, *CHATS], 2e-4),
        (["model=lora"], 2e-4),
        ([*PREFERENCES, *PRETRAINED], 1e-6),
        ([*PREFERENCES, *LORA], 1e-5),
        ([*ROLLOUTS, *PRETRAINED], 1e-6),
        ([*ROLLOUTS, *LORA], 1e-5),
        (["experiment=reverse", "data.path=a.jsonl"], 4e-3),
        (["optimizer=adafactor", *PRETRAINED], 2e-4),
        ([*PRETRAINED, "optimizer=muon", "optimizer.lr=3e-4"], 3e-4),
    ],
)
def test_what_has_learned_something_is_trained_at_the_customary_rate_and_new_weights_at_theirs(overrides, rate):
    assert rate_of(*overrides) == pytest.approx(rate)


@pytest.mark.parametrize("model", [PRETRAINED, LORA])
@pytest.mark.parametrize("data", [CHATS, PREFERENCES, ROLLOUTS])
def test_the_data_of_a_fine_tuning_have_the_models_own_tokenizer(data, model):
    assert composed(*data, *model).data.tokenizer == "some/model"


def length(*overrides: str) -> dict[str, Any]:
    """The settings of a trainer that decide how long it trains and when it validates."""
    cfg = composed(*overrides)
    node: Any = OmegaConf.to_container(cfg.trainer)
    node |= open_values(node, default_epochs(cfg))
    return {key: node[key] for key in ("max_epochs", "max_steps", "val_check_interval", "check_val_every_n_epoch")}


@pytest.mark.parametrize("model", [PRETRAINED, LORA])
def test_a_fine_tuning_has_three_epochs_and_validates_after_each(model):
    assert list(length(*model, *CHATS).values()) == [3, -1, 1.0, 1]
    assert list(length(*model, *CHATS, "trainer.max_epochs=5").values()) == [5, -1, 1.0, 1]


@pytest.mark.parametrize("model", [PRETRAINED, LORA])
@pytest.mark.parametrize("answers", [PREFERENCES, ROLLOUTS])
def test_answers_are_compared_for_one_epoch_with_four_validations(model, answers):
    assert list(length(*answers, *model).values()) == [1, -1, 0.25, 1]
    assert list(length(*answers, *model, "trainer.max_epochs=2").values()) == [2, -1, 0.5, 1]


def test_steps_on_the_command_line_win_over_the_epochs_and_are_validated_a_few_times():
    assert list(length(*PRETRAINED, "trainer.max_steps=1000").values()) == [None, 1000, 250, None]
    assert list(length(*PRETRAINED, "trainer.max_steps=6", "trainer.accumulate_grad_batches=2").values()) == [
        *(None, 6, 4, None)
    ]
    assert list(length(*PRETRAINED, "trainer.max_steps=9", "trainer.max_epochs=2").values()) == [2, 9, 0.5, 1]
    assert length(*PRETRAINED, "trainer.val_check_interval=7")["val_check_interval"] == 7
    assert length(*PRETRAINED, "debug=fast") == length("debug=fast")
    assert length("trainer.max_steps=1000")["val_check_interval"] == 250  # of new weights as well


QUIET = ["callbacks=measure", "trainer.enable_checkpointing=false", "trainer.accelerator=cpu"]
QUIET += ["+callbacks.learning_rate._target_=lit_fused.callbacks.LearningRate"]


def result(folder: Path, *overrides: str) -> tuple[str, int, list[int], list[float]]:
    """The line that a run says before it trains; its steps, those after which it validated, and the rate of each."""
    done = train(folder, *overrides, *QUIET, "hydra.run.dir=run")
    lines = re.findall(
        r"^.*: .*(?:epochs? (?:is|are)|steps?\b.* (?:is|are) [\d.]+ epochs).*$", done.output, re.MULTILINE
    )
    assert len(lines) == 1, done.output
    with (folder / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    rates = [float(value) for row in rows for key, value in row.items() if key.startswith("lr") and value]
    steps = summary(folder / "run")["steps"]
    return lines[0], steps, [int(row["step"]) + 1 for row in rows if row.get("val/loss")], rates


def test_a_pretrained_model_says_its_epochs_and_trains_them_with_a_schedule_that_ends_with_them(tmp_path):
    folder = pretrained(tmp_path / "model", "llama_tied")
    texts = ["data=text", f"data.path={text_folder(tmp_path)}", "data.block_size=32", "data.packing=documents"]
    said, steps, validated, rates = result(tmp_path, "model=pretrained", f"model.path={folder}", *texts)
    assert said == f"training: 3 epochs are {steps} steps"
    assert validated == [steps // 3, 2 * steps // 3, steps]
    assert max(rates) == pytest.approx(2e-5, rel=0.01)
    assert rates[-1] < 0.01 * max(rates)


def test_a_run_by_steps_says_how_many_epochs_they_are(tmp_path):
    said, steps, validated, _ = result(tmp_path, *TINY_MODEL, *SYNTHETIC, "trainer.max_steps=12")
    assert said == "training: 1.5 epochs are 12 steps"
    assert (steps, validated) == (12, [12])


@pytest.mark.slow
def test_a_stopped_fine_tuning_is_resumed_to_the_end_of_its_epochs_and_validated_by_path(tmp_path):
    folder = pretrained(tmp_path / "model", "llama_tied")
    words = ["model=pretrained", f"model.path={folder}", *SYNTHETIC, "data.vocab_size=97", "trainer.accelerator=cpu"]
    train(tmp_path, *words, "hydra.run.dir=begun", "trainer.max_steps=10")
    path = "ckpt_path=begun/checkpoints/last.ckpt"
    done = train(tmp_path, path, "trainer.max_steps=null", "hydra.run.dir=done")
    assert "3 epochs are 24 steps" in done.output
    assert summary(tmp_path / "done")["steps"] == 24
    train(tmp_path, "mode=validate", path, "hydra.run.dir=looked")
