"""``ckpt_path=X`` takes the configuration of X's run, with the command line on top."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import TINY_MODEL, text_folder, train
from composed import CONF, composed
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from lit_fused import UserError
from lit_fused.app.config import KEYS
from lit_fused.app.continued import NAME, continued, different_data


def saved(run: Path, *overrides: str, config: Any = None, cwd: str = "") -> str:
    """Make the folder of a run that was started with these overrides; return the path of its checkpoint."""
    (run / ".hydra").mkdir(parents=True)
    (run / "checkpoints").mkdir()
    content = OmegaConf.to_container(composed(*overrides)) if config is None else config
    (run / ".hydra" / "config.yaml").write_text(OmegaConf.to_yaml(content))
    (run / ".hydra" / "hydra.yaml").write_text(OmegaConf.to_yaml({"hydra": {"runtime": {"cwd": cwd}}}))
    (run / "checkpoints" / "last.ckpt").touch()
    return f"ckpt_path={run}/checkpoints/last.ckpt"


def configuration(*words: str) -> Any:
    """Return what Hydra composes for a command line."""
    name, changed = continued(words, CONF)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_container(compose(name, [word for word in changed if not word.startswith("--")]))


LORA = ["model=lora", "model@model.model=gemma2", "callbacks=ema", "trainer.max_steps=7", "strategy=fsdp2"]
TEXT = ["data=text", "data.path=corpus", "data.block_size=32", "~callbacks.export", "seed=5"]


@pytest.mark.slow
def test_the_runs_configuration_is_the_base_and_the_command_line_lies_on_top(tmp_path):
    lora, text = saved(tmp_path / "lora", *LORA, "+callbacks.mine={_target_: mine.M}"), saved(tmp_path / "text", *TEXT)
    theirs: Any = OmegaConf.to_container(OmegaConf.load(tmp_path / "lora" / ".hydra" / "config.yaml"))
    trust = "trust=mine.M"
    same = configuration("mode=validate", lora, trust)
    new = {"mode": "validate", "ckpt_path": lora.removeprefix("ckpt_path="), "trust": "mine.M"}
    assert same == {**theirs, **new}
    assert same["output_dir"] == "${hydra:runtime.output_dir}"

    # Values: of what only this run has, and what it has deleted or added already.
    assert (
        configuration(lora, trust, "callbacks.weight_average.decay=0.5")["callbacks"]["weight_average"]["decay"] == 0.5
    )
    assert "peak_memory" not in configuration(lora, trust, "~callbacks.peak_memory")["callbacks"]
    again = configuration(text, *TEXT, "+trainer.fast_dev_run=true")
    assert "export" not in again["callbacks"]
    assert (again["seed"], again["data"]["block_size"], again["trainer"]["fast_dev_run"]) == (5, 32, True)
    assert configuration(*LORA, lora, "+callbacks.mine={_target_: mine.M}")["callbacks"]["mine"] == {
        "_target_": "mine.M"
    }
    with pytest.raises(ConfigCompositionException, match="max_stepz"):
        configuration(text, "trainer.max_stepz=3")

    # Groups take the place of what the run had.
    groups = ["data=synthetic", "strategy=ddp", "callbacks=measure"]
    default: Any = OmegaConf.to_container(composed(*groups, "model=gemma2"))
    other = configuration(lora, *groups, "data.vocab_size=300")
    assert other["data"] == {**default["data"], "vocab_size": 300}
    assert other["callbacks"] == default["callbacks"]
    assert other["trainer"]["strategy"] == default["trainer"]["strategy"]
    assert other["trainer"]["max_steps"] == 7
    assert configuration(lora, trust, "strategy=auto")["trainer"]["strategy"] == "auto"
    assert configuration(lora, trust, "model=gemma2")["model"] == default["model"]
    inner = configuration(lora, trust, "model@model.model=llama")["model"]
    assert inner["model"]["config"]["_target_"] == "transformers.LlamaConfig"
    assert inner["peft_config"] == theirs["model"]["peft_config"]
    reverse = configuration(lora, trust, "experiment=reverse", "data.path=a.jsonl", "seed=9")
    expected: Any = OmegaConf.to_container(composed("experiment=reverse", "data.path=a.jsonl"))
    assert reverse["model"] == expected["model"]
    assert reverse["data"] == expected["data"]
    assert (reverse["trainer"]["max_steps"], reverse["optimizer"]["lr"], reverse["seed"]) == (1200, 4e-3, 9)
    assert reverse["trainer"]["strategy"] == theirs["trainer"]["strategy"]


def test_what_is_no_run_or_several_or_another_mode(tmp_path, capsys):
    one, two = saved(tmp_path / "one", *TEXT), saved(tmp_path / "two", *TEXT)
    both = f"{one},{two.removeprefix('ckpt_path=')}"
    assert continued(["-m", f"{one},{one.removeprefix('ckpt_path=')}"], CONF)[0] == NAME
    for words in (["mode=generate", one], ["mode=fit,plan", one], ["seed=1"], ["--help", one], ["ckpt_path=null"], []):
        assert continued(words, CONF) == ("train", words)
    with pytest.raises(UserError, match="are of several runs"):
        continued(["-m", both], CONF)
    (tmp_path / "alone.ckpt").touch()
    words = [f"ckpt_path={tmp_path / 'alone.ckpt'}"]
    assert continued(words, CONF) == ("train", words)
    assert "No configuration of a run lies beside" in capsys.readouterr().out


def test_choices_of_the_users_own_and_entries_that_hydra_would_obey(tmp_path):
    mine = tmp_path / "conf" / "experiment"
    mine.mkdir(parents=True)
    (mine / "mine.yaml").write_text("# @package _global_\ncallbacks: {stops: {_target_: stops.Stops}}\n")
    config: Any = OmegaConf.to_container(composed(*TEXT))
    config["callbacks"]["stops"] = {"_target_": "stops.Stops"}
    one = saved(tmp_path / "one", config={**config, "hydra": {"searchpath": ["x"]}, "defaults": [], "odd": 1})
    with pytest.raises(UserError, match="trust=stops.Stops"):
        continued([one], CONF)
    name, words = continued(["--config-dir", str(tmp_path / "conf"), "experiment=mine", one], CONF)
    assert (name, words) == (NAME, ["--config-dir", str(tmp_path / "conf"), "experiment=mine", one])
    assert "odd" not in configuration(one, "trust=[stops.Stops]")
    assert "odd" not in KEYS


def test_data_that_differ_are_named_and_relative_paths_are_those_of_the_run(tmp_path, monkeypatch):
    home, here = tmp_path / "home", tmp_path / "here"
    (home / "corpus").mkdir(parents=True)
    here.mkdir()
    monkeypatch.chdir(here)
    one = saved(home / "run", *TEXT, cwd=str(home))
    cfg = configuration(one)
    assert cfg["data"]["path"] == str(home / "corpus")
    checkpoint = one.removeprefix("ckpt_path=")
    of_items = ("module=recommender", "data=interactions", "data.path=corpus", "data.items=corpus")
    assert configuration(saved(home / "two", *of_items, cwd=str(home)))["data"]["items"] == str(home / "corpus")

    def data(*words: str) -> Any:
        return OmegaConf.to_container(OmegaConf.create(configuration(one, *words)).data, resolve=True)

    assert different_data(data("data.batch_size=2"), checkpoint) is None
    sentence = different_data(data("data.path=other"), checkpoint) or ""
    assert f"data.path is other in place of {home / 'corpus'}" in sentence
    assert f"data.tokenizer={home / 'run' / 'exported'}" in sentence
    assert "tokenizer is x in place of None" in (different_data(data("data.tokenizer=x"), checkpoint) or "")


def test_an_empty_configuration_is_refused_by_its_name(tmp_path):
    one = saved(tmp_path / "one", *TEXT)
    (tmp_path / "one" / ".hydra" / "config.yaml").write_text("")
    with pytest.raises(UserError, match=r"one/\.hydra/config\.yaml is no configuration of a run: it is empty"):
        continued([one, "seed=2"], CONF)


@pytest.mark.timeout(240)
def test_a_path_is_enough_to_evaluate_and_to_resume(tmp_path):
    text_folder(tmp_path / "home")
    given = ["data=text", "data.path=corpus", "data.vocab_size=400", "data.block_size=32", *TINY_MODEL]
    given += ["callbacks=ema", "optimizer.lr=1e-2"]
    started = train(tmp_path / "home", *given, "~callbacks.sample_text", "trainer.max_steps=4", "hydra.run.dir=out")
    assert started.status == 0, started.output
    last = tmp_path / "home" / "out" / "checkpoints" / "last.ckpt"

    def metrics(folder: Path) -> Any:
        return json.loads((folder / "summary.json").read_text())

    expected = metrics(tmp_path / "home" / "out")["metrics"]["val/loss"]
    done = train(tmp_path, "-m", "mode=validate,test", f"ckpt_path={last}", "hydra.sweep.dir=evaluated")
    assert done.status == 0, done.output
    assert metrics(tmp_path / "evaluated" / "0")["metrics"]["val/loss"] == expected
    assert metrics(tmp_path / "evaluated" / "1")["metrics"]["test/loss"] == expected
    assert "not the data" not in done.output
    done = train(tmp_path, f"ckpt_path={last}", "trainer.max_steps=6", "hydra.run.dir=on")
    assert done.status == 0, done.output
    assert metrics(tmp_path / "on")["steps"] == 6
    assert (tmp_path / "on" / "exported" / "tokenizer.json").is_file()
