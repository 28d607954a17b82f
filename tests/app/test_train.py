"""``python train.py`` as a user runs it: real processes, real files, what the terminal shows and says."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import (
    ROOT,
    SYNTHETIC,
    TINY_MODEL,
    Finished,
    summary,
    text_folder,
    train,
    train_anew,
)
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, Finished, list[str]]:
    """One ordinary run on text: its folder, what it printed, its overrides."""
    folder = tmp_path_factory.mktemp("run")
    overrides = [
        "data=text",
        f"data.path={text_folder(folder)}",
        "data.vocab_size=400",
        "data.block_size=32",
        "data.batch_size=4",
        "trainer.max_steps=40",
        "callbacks.checkpoint.every_n_train_steps=20",
        "optimizer.lr=1e-2",
        *TINY_MODEL,
    ]
    return folder, train_anew(folder, *overrides, "hydra.run.dir=out"), overrides


def test_a_run_shows_progress_samples_memory_results_and_where_everything_lies(run):
    folder, finished, _ = run
    for shown in (
        "step 40/40, loss ",
        "tokens/s ",
        "Total params",
        "Sample before training",
        "Sample after training",
        "Peak memory per phase",
        "logits 4 x 32 x 400 in float32, no more than one chunk",
        "val/perplexity",
    ):
        assert shown in finished.output, shown
    assert finished.output.count("GPU available: ") == 1
    for odd in ("INFO", "TPU", "was configured", "e+0", "site-packages"):
        assert odd not in finished.output, odd
    for place in ("checkpoints/last.ckpt", "metrics.csv", "exported", "summary.json", "report.html"):
        assert (folder / "out" / place).exists()
    for place in ("out/exported", "out/report.html", "ckpt_path=out"):
        assert place in finished.output
    assert "Traceback" not in finished.output
    assert "Tip:" not in finished.output


def test_the_loss_falls_and_the_summary_holds_what_was_logged(run):
    folder, _, _ = run
    found = summary(folder / "out")
    metrics = found["metrics"]
    assert (found["status"], found["steps"], found["tokens"]) == ("completed", 40, 40 * 4 * 32)
    assert metrics["val/perplexity"] == pytest.approx(math.exp(metrics["val/loss"]), rel=1e-4)
    assert metrics["train/loss"] < 0.85 * math.log(400)
    assert metrics["throughput/tokens_per_sec"] > 0
    for phase in ("forward", "backward", "optimizer"):
        assert 0 < metrics[f"memory/{phase}_gib"] <= metrics["memory/peak_allocated_gib"]


def test_the_exported_model_and_tokenizer_load_and_continue_text(run):
    folder, _, _ = run
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "out" / "exported")
    tokenizer = AutoTokenizer.from_pretrained(folder / "out" / "exported")
    state = torch.load(folder / "out" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, state[f"model.backbone.{name}"]), name
    card = (folder / "out" / "exported" / "README.md").read_text()
    for said in (
        "AutoModelForCausalLM",
        "| 40 optimizer steps |",
        "| val/loss |",
        "| peak memory |",
        "AdamW",
    ):
        assert said in card, said
    assert str(folder) not in card
    modes = {path.stat().st_mode & 0o444 for path in (folder / "out" / "exported").iterdir()}
    assert modes == {0o444 & ~os.umask(os.umask(0o022)) | 0o400}, "others may read what they may of any new file"
    tokens = model.generate(**tokenizer("def f(", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(tokens[0]).startswith("def f(")


def test_a_checkpoint_of_another_model_is_refused_in_one_sentence(run):
    folder, _, overrides = run
    finished = train(folder, *overrides, "model.config.hidden_size=32", "ckpt_path=out/checkpoints/last.ckpt", status=1)
    assert "the checkpoint is of another model" in finished.plain
    assert "Traceback" not in finished.output


def reversed_words(folder: Path) -> str:
    """Write pairs as the example does, and return the override that names their file."""
    subprocess.run([sys.executable, ROOT / "examples" / "seq2seq.py", folder / "reversed.jsonl"], check=True)
    return f"data.path={folder / 'reversed.jsonl'}"


REVERSE = ["experiment=reverse", "data.batch_size=32", "data.val_fraction=0.1"]


@pytest.mark.slow
def test_the_reversing_experiment_learns_to_reverse_lines_that_it_has_not_seen(tmp_path):
    overrides = [*REVERSE, reversed_words(tmp_path)]
    train(tmp_path, *overrides, "trainer.max_steps=1", "trainer.val_check_interval=1", "hydra.run.dir=first")
    train(tmp_path, *overrides, "trainer.max_steps=600", "trainer.val_check_interval=600", "hydra.run.dir=last")
    before, after = (summary(tmp_path / folder)["metrics"] for folder in ("first", "last"))
    assert before["val/accuracy"] < 0.3
    assert after["val/accuracy"] > 0.8
    assert after["val/loss"] < 0.5 * before["val/loss"]


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_a_sweep_over_every_loss_trains_each_and_ends_with_one_table_and_one_picture(tmp_path):
    losses = ["standard", "model", "chunked", "filtered", "torch_native", "torch_compile", "cce"]
    finished = train(
        tmp_path,
        "-m",
        f"loss={','.join(losses)}",
        "trainer.max_steps=3",
        "hydra.sweep.dir=sweep",
        *SYNTHETIC,
        *TINY_MODEL,
    )
    final = [summary(tmp_path / "sweep" / str(number))["metrics"]["val/loss"] for number in range(len(losses))]
    assert final == pytest.approx([final[0]] * len(losses), rel=1e-4)
    table = (tmp_path / "sweep" / "report.md").read_text()
    for loss in losses:
        assert re.search(rf"\| *{loss}( \(ran as \w+\))? *\|", table), table
    assert (tmp_path / "sweep" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert all(line in finished.output for line in table.splitlines() if line.startswith("|"))
    warned = re.findall(r"loss=cce needs a CUDA GPU of compute capability 8.0.*?instead", finished.plain)
    assert len(warned) == ("cce" in losses)


@pytest.mark.parametrize("precision", [pytest.param("bf16-mixed", marks=pytest.mark.slow), "bf16-true"])
def test_a_run_in_bfloat16_trains(precision, tmp_path):
    train(tmp_path, "loss=chunked", f"precision={precision}", "trainer.max_steps=3", *SYNTHETIC, *TINY_MODEL)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data=text", "data.path=nowhere.txt"], "nowhere"),
        (["data=text", "data.path=empty.txt"], "empty"),
        (["loss=liger", *SYNTHETIC], "loss=liger cannot run here: it needs a CUDA GPU.*choose loss=chunked"),
        (["strategy=fsdp2_tp", "trainer.devices=3", *SYNTHETIC], "3 devices cannot be grouped by"),
    ],
    ids=["missing", "empty", "liger", "grid"],
)
def test_bad_input_ends_with_a_sentence_and_not_with_a_traceback(overrides, message, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    finished = train(tmp_path, "trainer.max_steps=2", *TINY_MODEL, *overrides, status=1)
    assert re.search(message, finished.plain), finished.output
    assert "Traceback" not in finished.output
    assert not list(tmp_path.rglob("*.ckpt"))
