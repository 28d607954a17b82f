"""``python -m lit_fused.export`` on the checkpoints of a real run: folders of two ranks, and files."""

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TINY_MODEL, export, run_forked, text_folder, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_fused.export.__main__ import main
from lit_fused.parallel.checkpoint import read_checkpoint


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a run of two ranks, whose text is named by a relative path."""
    folder = tmp_path_factory.mktemp("export")
    text_folder(folder)
    train(
        folder,
        *("data=text", "data.path=corpus", "data.vocab_size=400", "data.block_size=32", "data.batch_size=4"),
        *("strategy=fsdp2", "trainer.devices=2", "trainer.accelerator=cpu", "trainer.max_steps=4"),
        *("callbacks.checkpoint.every_n_train_steps=4", *TINY_MODEL, "hydra.run.dir=out"),
        ranks=2,
    )
    assert (folder / "out" / "checkpoints" / "last.ckpt").is_dir()
    return folder / "out"


def assert_same_folder(one: Path, other: Path) -> None:
    # Only a run knows what stands in the model card.
    assert {file.name for file in other.iterdir()} == {file.name for file in one.iterdir()} | {"README.md"}
    for file in (file for file in one.iterdir() if file.name != ".lit_fused.json"):  # It lists the card, too.
        assert file.read_bytes() == (other / file.name).read_bytes(), file.name


def test_the_command_writes_from_a_folder_what_the_run_itself_exported(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(run.parent / "cache"))
    done = export(tmp_path, run / "checkpoints" / "last.ckpt", "model")
    assert done.output == "wrote model\n"
    assert_same_folder(tmp_path / "model", run / "exported")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    tokens = AutoTokenizer.from_pretrained(tmp_path / "model")("two times", return_tensors="pt")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.generate(**tokens, max_new_tokens=2, do_sample=False).shape[1] == tokens["input_ids"].shape[1] + 2


STOPPED_WHILE_WRITING = """
import os
import sys

from transformers import PreTrainedTokenizerBase

from lit_fused.export.__main__ import main

written = PreTrainedTokenizerBase.save_pretrained


def stopped(*arguments, **options):
    os.kill(os.getpid(), int(sys.argv[1]))
    return written(*arguments, **options)


PreTrainedTokenizerBase.save_pretrained = stopped
main(sys.argv[2:])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_export_that_is_stopped_leaves_no_folder_under_its_name(number, run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(run.parent / "cache"))
    script = tmp_path / "script.py"
    script.write_text(STOPPED_WHILE_WRITING)
    (tmp_path / "models").mkdir()
    arguments = [int(number), run / "checkpoints" / "last.ckpt", tmp_path / "models" / "model"]
    assert run_forked(script, run.parent, arguments, status=None).status
    assert not (tmp_path / "models" / "model").exists()


@pytest.mark.slow
def test_weights_of_a_file_keep_their_dtype_and_the_tokenizer_may_be_left_out(run, tmp_path):
    halves = read_checkpoint(run / "checkpoints" / "last.ckpt")
    halves["state_dict"] = {name: weight.bfloat16() for name, weight in halves["state_dict"].items()}
    torch.save(halves, run / "checkpoints" / "halves.ckpt")
    main([str(run / "checkpoints" / "halves.ckpt"), str(tmp_path / "halves"), "--no-tokenizer"])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "halves").dtype == torch.bfloat16
    assert not list((tmp_path / "halves").glob("tokenizer*"))


def test_what_is_no_checkpoint_or_exists_is_refused_and_nothing_is_left(run, tmp_path):
    last = run / "checkpoints" / "last.ckpt"
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    shutil.copytree(last, tmp_path / "half.ckpt", ignore=shutil.ignore_patterns("meta.pt"))
    shutil.copytree(last, tmp_path / "lost.ckpt")
    other = tmp_path / "other_run"
    shutil.copytree(last, other / "last.ckpt")
    (other / "run.json").write_text((run / "run.json").read_text().replace("hidden_size=16", "hidden_size=32"))
    for arguments, message in (
        ([tmp_path / "nothing.ckpt", "x"], "there is no .*nothing.ckpt"),
        ([tmp_path / "half.ckpt", "x"], "is a folder without meta.pt, and no checkpoint"),
        ([tmp_path / "lost.ckpt", "x"], r"no folder above .*lost.ckpt is that of a run"),
        ([other / "last.ckpt", "x"], "the checkpoint is of another model: .* there, .* here"),
        ([last, run], "exists already; choose another folder"),
    ):
        output = [tmp_path / arguments[-1] if isinstance(arguments[-1], str) else arguments[-1]]
        before = sorted(tmp_path.iterdir())
        with pytest.raises(SystemExit) as refused:
            main([str(argument) for argument in [*arguments[:-1], *output]])
        assert re.search(message, str(refused.value)), message
        assert sorted(tmp_path.iterdir()) == before
