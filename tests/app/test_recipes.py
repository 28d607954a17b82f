"""Recipes and files of one's own: each runs as its page says, on a tiny model."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, TINY_MODEL, summary, train
from composed import composed
from hydra.utils import instantiate
from peft import PeftModel
from pretrained_folders import pretrained
from tiny_models import tiny_model

from lit_fused.app.commands import generating
from lit_fused.app.commands.training import build_module, warn_of_positions

PAGE = (ROOT / "docs" / "commands.md").read_text()
CHATML = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
SMALL = ["data.block_size=24", "trainer.max_steps=2", "trainer.max_epochs=null", "data.batch_size=2"]
SMALL += ["callbacks=measure", "trainer.enable_checkpointing=false", "trainer.accelerator=cpu", "hydra.run.dir=out"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pretrained model with a chat template, and data of the kinds that the recipes learn."""
    pretrained(tmp_path / "model", "llama")
    (tmp_path / "model" / "chat_template.jinja").write_text(CHATML)
    turns = [
        [{"role": "user", "content": f"w{i % 9 + 3} w4"}, {"role": "assistant", "content": f"w{i % 7 + 4} w9"}]
        for i in range(40)
    ]
    pairs = [{"prompt": f"w{i % 9 + 3}", "chosen": f" w{i % 7 + 4}", "rejected": f" w{i % 7 + 20}"} for i in range(40)]
    for name, records in (("chats", [{"messages": messages} for messages in turns]), ("pairs", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "texts").mkdir()
    for i in range(20):
        (tmp_path / "texts" / f"{i}.txt").write_text(" ".join(f"w{(i * j) % 90 + 3}" for j in range(60)))
    return tmp_path


def metrics(folder: Path) -> dict[str, Any]:
    return summary(folder)["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "data"),
    [
        ("continue_pretraining", "texts"),
        ("chat_fine_tuning", "chats.jsonl"),
        ("lora", "chats.jsonl"),
        ("dpo", "pairs.jsonl"),
        ("long_context", "texts"),
    ],
)
def test_a_recipe_trains(recipe, data, folder):
    train(folder, f"experiment={recipe}", "model.path=model", f"data.path={data}", *SMALL)
    assert metrics(folder / "out")["train/loss"] > 0
    assert f"experiment={recipe} " in PAGE


def test_the_files_of_the_page_work_as_they_stand(tmp_path):
    (tmp_path / "README.md").write_text("a text of some words\n" * 400)
    experiment, whole = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_conf" / "experiment").mkdir(parents=True)
    (tmp_path / "my_conf" / "experiment" / "mine.yaml").write_text(experiment)
    (tmp_path / "my_conf" / "mine.yaml").write_text(whole)
    small = [*TINY_MODEL, "data.vocab_size=300", "trainer.max_steps=2", "~callbacks.sample_text"]
    for number, flags in enumerate((["experiment=mine"], ["--config-name", "mine"])):
        train(tmp_path, "--config-dir", "my_conf", *flags, *small, f"hydra.run.dir={number}")
        assert json.loads((tmp_path / str(number) / "run.json").read_text())["config"]["data"]["block_size"] == 64
    (tmp_path / "my_conf" / "experiment" / "wrong.yaml").write_text(experiment.split("\n", 1)[1].split("\n\n")[1])
    done = train(tmp_path, "--config-dir", "my_conf", "experiment=wrong", status=1)
    assert "its file needs the first line # @package _global_" in done.output


def test_a_pretrained_model_is_evaluated_by_command_and_one_with_random_weights_is_not(folder):
    data = ["data=text", "data.path=texts", "data.block_size=24", "trainer.accelerator=cpu", "callbacks=measure"]
    train(folder, "mode=validate", "model=pretrained", "model.path=model", *data, "hydra.run.dir=base")
    assert metrics(folder / "base")["val/loss"] > 0
    done = train(folder, "mode=test", "model=pretrained", "model.path=model", *data, "hydra.run.dir=test")
    assert "The data have no test part: the validation part is used." in done.output
    assert metrics(folder / "test")["test/loss"] == pytest.approx(metrics(folder / "base")["val/loss"])
    done = train(folder, "mode=validate", *data, status=1)
    assert "mode=validate needs trained weights: ckpt_path=RUN, or model=pretrained" in done.output


def test_adapters_are_put_around_a_pretrained_model_by_its_path(folder):
    train(folder, "model=lora", "model.path=model", "data=chat", "data.path=chats.jsonl", *SMALL)
    assert json.loads((folder / "out" / "run.json").read_text())["config"]["optimizer"]["lr"] == 2e-4


def test_one_step_trains_at_its_rate(tmp_path):
    train(tmp_path, "data=synthetic", *TINY_MODEL, "trainer.max_steps=1", "hydra.run.dir=out")
    rates = re.findall(r"[\d.e-]+", (tmp_path / "out" / "metrics.csv").read_text())
    assert "0.001" in rates


@pytest.mark.slow
def test_adapters_train_around_weights_of_4_bits_and_the_run_is_resumed_and_exported(folder):
    pytest.importorskip("bitsandbytes")
    small = [word for word in SMALL if "enable_checkpointing" not in word and word != "callbacks=measure"]
    words = ["model=lora", "model.path=model", "model.load_in_4bit=true", "data=chat", "data.path=chats.jsonl", *small]
    train(folder, *words, "~callbacks.sample_text")
    assert metrics(folder / "out")["train/loss"] > 0
    train(folder, "ckpt_path=out", "trainer.max_steps=3", "hydra.run.dir=on")
    PeftModel.from_pretrained(tiny_model("llama"), folder / "on" / "exported" / "adapter")


def test_a_conversation_goes_on_with_what_was_said(folder, monkeypatch, capsys):
    said, prompts, encode = iter(["w3 w4", "w5", ""]), [], generating.encode_prompt
    monkeypatch.setattr("builtins.input", lambda _: next(said))
    monkeypatch.setattr(generating, "encode_prompt", lambda p, *a, **k: prompts.append([*p]) or encode(p, *a, **k))
    words = ["mode=chat", "model=pretrained", f"model.path={folder / 'model'}", "trainer.accelerator=cpu"]
    generating.chat(composed(*words, "generate.max_new_tokens=4", "generate.temperature=0"))
    answers = [message["content"] for message in prompts[1] if message["role"] == "assistant"]
    assert [len(prompt) for prompt in prompts] == [1, 3]
    assert len(answers) == 1
    assert answers[0] in capsys.readouterr().out


def test_rows_longer_than_the_models_positions_are_trained_with_a_warning(recwarn):
    cfg = composed("data=synthetic", *TINY_MODEL, "model.config.max_position_embeddings=32")
    module = build_module(cfg, instantiate(cfg.loss))
    for block_size, warnings in ((None, 0), (32, 0), (64, 1)):
        recwarn.clear()
        warn_of_positions(module, block_size)
        assert len(recwarn) == warnings
    [said] = recwarn
    assert "data.block_size=64 tokens are longer than the 32 positions that the configuration of Llama" in str(said)
