"""``ckpt_path=X`` begins with the overrides of X's run, of which none may name code that was not typed."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import SYNTHETIC, TINY_MODEL, summary, text_folder, train
from composed import CONF, composed
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

from lit_fused import UserError
from lit_fused.app.overrides import checkpoint_of, configuration_of, overrides_of, run_of, with_run
from lit_fused.app.run_folder import read_run_file

TEXT = ["data=text", "data.path=corpus", "data.block_size=32", "~callbacks.export", "seed=5"]
LORA = ["model=lora", "model@model.model=gemma2", "callbacks=ema", "trainer.max_steps=7", "strategy=fsdp2"]


def saved(run: Path, overrides: Sequence[str], **more: Any) -> str:
    """Make the folder of a run that was started with these overrides; return the word that names its checkpoint."""
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "last.ckpt").touch()
    (run / "run.json").write_text(json.dumps({"overrides": [*overrides], "cwd": "", "flags": [], **more}))
    return f"ckpt_path={run}/checkpoints/last.ckpt"


def configuration(run: Path, *typed: str) -> Any:
    with configuration_of(run, typed) as cfg:
        return OmegaConf.to_container(cfg)


def test_the_runs_overrides_come_first_and_the_typed_ones_win(tmp_path):
    one, lora = saved(tmp_path / "one", [*TEXT, "mode=fit", "output_dir=x", "hydra.run.dir=y"]), tmp_path / "lora"
    saved(lora, LORA)
    assert with_run(["mode=validate", one, "seed=6"]) == [*TEXT[:-1], "mode=validate", one, "seed=6"]
    assert with_run(["-m", "seed=1,2", one]) == ["-m", *TEXT[:-1], "seed=1,2", one]
    again = [*TEXT, one, "trainer.max_steps=9"]
    assert with_run(again) == again, "a process that Lightning starts has the whole command line"
    same = configuration(lora)
    assert (same["trainer"]["max_steps"], same["model"]["model"]["config"]["_target_"]) == (
        7,
        "transformers.Gemma2Config",
    )
    assert "export" not in configuration(tmp_path / "one")["callbacks"]
    assert configuration(lora, "callbacks.weight_average.decay=0.5")["callbacks"]["weight_average"]["decay"] == 0.5
    with pytest.raises(HydraException, match="max_stepz"):
        configuration(lora, "trainer.max_stepz=3")


def test_a_group_chosen_anew_drops_what_was_set_below_it(tmp_path):
    saved(tmp_path, [*TEXT, *LORA, "loss.chunk_size=512"])
    changed = configuration(tmp_path, "data=synthetic", "strategy=ddp", "callbacks=measure", "loss=cce", "model=gemma2")
    plain: Any = OmegaConf.to_container(composed("callbacks=measure", "data=synthetic"))
    assert changed["data"] == plain["data"]
    assert changed["callbacks"] == plain["callbacks"]
    assert changed["loss"] == {"_target_": "lit_fused.LinearCrossEntropyLoss", "impl": "cce"}
    assert changed["model"]["_target_"] == "lit_fused.from_config"
    assert changed["trainer"]["max_steps"] == 7
    inner = configuration(tmp_path, "model@model.model=llama")["model"]
    assert inner["model"]["config"]["_target_"] == "transformers.LlamaConfig"
    assert "peft_config" in inner


def test_transformers_own_loaders_never_ask_whether_a_folders_code_may_run(tmp_path):
    saved(tmp_path, ["model=pretrained", "model.path=a/b"])
    theirs = "model._target_=transformers.AutoModelForCausalLM.from_pretrained"
    assert configuration(tmp_path, theirs)["model"]["trust_remote_code"] is False


def test_a_program_that_uses_hydra_itself_composes_the_configuration_of_a_run_and_goes_on(tmp_path):
    saved(tmp_path, ["seed=5"])
    with initialize_config_dir(str(CONF), version_base="1.3"):
        assert configuration(tmp_path)["seed"] == 5
        assert compose("train", ["seed=6"])["seed"] == 6


def test_a_checkpoint_is_named_by_its_file_its_runs_folder_or_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    old, new = Path("outputs/2026-01-01/10-00-00"), Path("outputs/2026-01-02/10-00-00")
    for run, time in ((old, 1), (new, 2)):
        saved(run, ["seed=5"])
        os.utime(run / "run.json", (time, time))
    assert checkpoint_of("last") == checkpoint_of(str(new)) == new / "checkpoints" / "last.ckpt"
    assert with_run([f"ckpt_path={old}"]) == ["seed=5", f"ckpt_path={old}/checkpoints/last.ckpt"]
    (new / "checkpoints" / "last.ckpt").rename(new / "checkpoints" / "step-000004.ckpt")
    assert checkpoint_of(str(new)).name == "step-000004.ckpt"
    (new / "checkpoints" / "step-000004.ckpt").unlink()
    assert checkpoint_of("last").is_relative_to(old)
    for path, said in ((str(new), "has no checkpoint"), ("no.ckpt", "there is no no.ckpt"), ("conf", "there is no")):
        with pytest.raises(UserError, match=said):
            checkpoint_of(path)
    assert run_of(old / "a" / "checkpoints" / "last.ckpt") is None


@pytest.mark.parametrize("name", ["epoch=1-step=20.ckpt", "best-{step}.ckpt", "loss,3.ckpt", "a b's.ckpt"])
def test_a_checkpoint_is_named_as_it_is_whatever_hydra_reads_in_its_name(name, tmp_path):
    saved(tmp_path, ["seed=5"])
    path = tmp_path / "checkpoints" / name
    path.touch()
    words = with_run([f"ckpt_path={path}"])
    assert composed(*words).ckpt_path == str(path)
    assert with_run(words[1:]) == words, "a process that Lightning starts has the quoted name"


def test_a_checkpoint_without_a_run_stands_alone(tmp_path, capsys):
    (tmp_path / "alone.ckpt").touch()
    words = [f"ckpt_path={tmp_path / 'alone.ckpt'}"]
    assert with_run(words) == words
    assert "No run.json of a run lies beside" in capsys.readouterr().out
    for words in (["seed=1"], ["ckpt_path=null"], ["ckpt_path="], []):
        assert with_run(words) == words


def test_relative_paths_are_those_of_the_folder_that_the_run_was_started_in(tmp_path, monkeypatch):
    home = tmp_path / "my home"
    for name in ("corpus", "a.jsonl", "b c.jsonl"):
        (home / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    sets = "data.path={web: a.jsonl, code: 'b c.jsonl'}"
    saved(home / "one", [*TEXT, "model=pretrained", "model.path=Qwen/Qwen3-0.6B"], cwd=str(home))
    saved(home / "two", ["data=text", sets], cwd=str(home))
    cfg = configuration(home / "one")
    assert (cfg["data"]["path"], cfg["model"]["path"]) == (str(home / "corpus"), "Qwen/Qwen3-0.6B")
    assert configuration(home / "one", "data.path=corpus")["data"]["path"] == "corpus"
    assert configuration(home / "two")["data"]["path"] == {"web": f"{home}/a.jsonl", "code": f"{home}/b c.jsonl"}


ATTACKS = [
    "model._target_=os.system",
    "+callbacks.x._target_=os.system",
    "++callbacks.x={_target_: os.system, command: touch ran}",
    "model={_target_:os.system}",
    "data.path={web: {_target_: os.system}}",
    "+model._args_=[1]",
    "+optimizer._partial_=false",
    "+model.trust_remote_code=true",
    "+model.weights_only=false",
    "+model.code_revision=x",
    "model.attn_implementation=someone/kernels",
    "+model.experts_implementation=someone/kernels",
    "+model.use_kernels=true",
    "+model.config.auto_map={AutoModelForCausalLM: a/b--c.D}",
    "+model.peft_config.megatron_core=x",
    "+model.proxies={https: elsewhere}",
    "+model.offload_folder=/somewhere",
    "loss.impl=os.system",
    'model=${oc.decode:"{_targ", "et_: os.system}"}',
    "data.tokenizer=${oc.create:{a:1}}",
    "loss.impl=${metric}",
    "model=../../../stranger/evil",
    "model@model.model=../../../stranger/evil",
    "+experiment=[reverse,../../stranger/evil]",
    "--config-dir=stranger",
    "-m",
    "--config-name",
    "callbacks.export.folder=/somewhere/else",
    "callbacks.checkpoint.dirpath=..",
    "callbacks.checkpoint.filename=../../else",
    "callbacks.checkpoint.filename=\n/../../else",
    "callbacks.checkpoint.filename=/else",
    "logger.csv.save_dir=..",
    "logger.csv.name=../../x",
    "logger.csv.version=../x",
    "+logger.tensorboard.sub_dir=/else",
    "logger.mlflow.tracking_uri=http://elsewhere",
    "+logger.wandb.entity=stranger",
    "+model.adapter_name=../../else",
    "trainer.default_root_dir=/else",
    "score.path=/somewhere/scores.parquet",
    "recommend.output=/somewhere/else",
    "score={path: /somewhere}",
    "loss={impl: os.system}",
    "callbacks.export={folder: /somewhere/else}",
    "callbacks.checkpoint={filename: ../../else}",
    "hydra/launcher@model=basic",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_override_of_a_run_that_could_run_code_or_write_elsewhere_is_refused_unless_it_is_typed(attack, tmp_path):
    one = saved(tmp_path, ["seed=5", attack])
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "run.json"))) as error:
        with_run([one])
    assert "\n" not in str(error.value)
    assert "if you trust it, type it again" in str(error.value)
    with pytest.raises(UserError), configuration_of(tmp_path):
        pass
    if not attack.startswith("-"):
        assert with_run([one, attack]) == ["seed=5", one, attack]


def test_a_strangers_run_folder_runs_nothing(tmp_path):
    """Its configuration is not instantiated, its own conf/ is not searched, and it changes no flag of the command."""
    evil = {"_target_": "pathlib.Path.touch", "self": str(tmp_path / "ran")}
    config = {"model": evil, "hydra": {"searchpath": ["file://."]}, "defaults": [{"model": "evil"}]}
    overrides = [*SYNTHETIC, *TINY_MODEL]
    one = saved(tmp_path / "run", overrides, config=config, cwd=str(tmp_path / "run"), hydra=config, evil=evil)
    for place in (tmp_path / "run", tmp_path / "run" / ".hydra", tmp_path / "run" / "conf" / "model"):
        place.mkdir(parents=True, exist_ok=True)
        for name in ("config.yaml", "evil.yaml", "train.yaml"):
            (place / name).write_text(json.dumps(config | evil))
    (tmp_path / "run" / "torch.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    for mode in ("fit", "validate", "generate"):
        train(tmp_path, one, f"mode={mode}", "prompt=a", "callbacks=measure", "trainer.max_steps=1", status=1)
    saved(tmp_path / "two", ["model=evil", *overrides], cwd=str(tmp_path / "run"))
    assert "Could not find 'model/evil'" in train(tmp_path, f"ckpt_path={tmp_path / 'two'}", status=1).output
    assert not (tmp_path / "ran").exists()


def test_a_folder_of_choices_of_the_users_own_has_to_be_typed_again(tmp_path):
    one = saved(tmp_path, ["experiment=mine"], flags=["--config-dir", "my conf"])
    with pytest.raises(UserError, match="was started with --config-dir 'my conf', whose files can name code"):
        with_run([one])
    words = ["--config-dir", "my conf", one]
    assert with_run(words) == [*words[:2], "experiment=mine", one]


@pytest.mark.parametrize("text", ["", "[", "[1]", '{"overrides": 3}', "[" * 100_000, "\x00"])
def test_a_broken_file_is_that_of_no_overrides(text, tmp_path):
    saved(tmp_path, [])
    (tmp_path / "run.json").write_text(text)
    assert read_run_file(tmp_path) == {}
    assert overrides_of(tmp_path) == []


def test_a_path_is_enough_to_evaluate_and_to_resume(tmp_path):
    home = tmp_path / "home"
    text_folder(home)
    given = ["data=text", "data.path=corpus", "data.vocab_size=400", "data.block_size=32", *TINY_MODEL]
    given += ["callbacks=ema", "optimizer.lr=1e-2"]
    train(home, *given, "~callbacks.sample_text", "trainer.max_steps=4", "hydra.run.dir=out")

    expected = summary(home / "out")["metrics"]["val/loss"]
    done = train(tmp_path, "-m", "mode=validate,test", f"ckpt_path={home / 'out'}", "hydra.sweep.dir=evaluated")
    assert summary(tmp_path / "evaluated" / "0")["metrics"]["val/loss"] == expected
    assert summary(tmp_path / "evaluated" / "1")["metrics"]["test/loss"] == expected
    assert "not the data" not in done.output
    train(tmp_path, f"ckpt_path={home / 'out'}", "trainer.max_steps=6", "hydra.run.dir=on")
    assert summary(tmp_path / "on")["steps"] == 6
    assert (tmp_path / "on" / "exported" / "tokenizer.json").is_file()
