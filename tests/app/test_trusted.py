"""Test what a stranger's configuration may name, and what of it is refused before anything is called."""

import copy
import re
import time
from pathlib import Path
from typing import Any

import pytest
from composed import CONF
from omegaconf import OmegaConf

from lit_fused import UserError
from lit_fused.app.config import refuse_code_of_folders
from lit_fused.app.continued import continued
from lit_fused.app.reporting.runs import read_run
from lit_fused.app.restore import configuration_of, run_of
from lit_fused.app.run_config import folder_of_run, read_config
from lit_fused.app.run_folder import overrides_in
from lit_fused.app.trusted import check_trusted

CONFIG = {
    "output_dir": "${hydra:runtime.output_dir}",
    "model": {
        "_target_": "lit_fused.from_config",
        "config": {"_target_": "transformers.LlamaConfig", "vocab_size": 300},
    },
    "data": {"_target_": "lit_fused.data.SyntheticDataModule", "tokenizer": "${oc.select:model.path,null}"},
    "loss": {"_target_": "lit_fused.LinearCrossEntropyLoss", "impl": "chunked"},
    "callbacks": {
        "export": {"_target_": "lit_fused.callbacks.ExportPretrained", "folder": "${output_dir}/exported"},
        "checkpoint": {
            "_target_": "lightning.pytorch.callbacks.ModelCheckpoint",
            "dirpath": "${output_dir}/checkpoints",
            "filename": "step-{step:06d}",
        },
    },
    "logger": {"csv": {"_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": "${output_dir}", "name": ""}},
    "trainer": {"_target_": "lightning.pytorch.Trainer", "callbacks": "${oc.dict.values:callbacks}"},
}


def saved(folder: Path, content: Any) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(OmegaConf.to_yaml(content))
    return folder


def test_every_choice_of_the_project_is_trusted(tmp_path):
    check_trusted(CONFIG, tmp_path, ())
    for file in CONF.rglob("*.yaml"):
        check_trusted(OmegaConf.to_container(OmegaConf.load(file)), tmp_path, ())


ATTACKS: list[tuple[str, Any]] = [
    ("model", {"_target_": "torch.load", "f": "x", "weights_only": False}),
    ("model", {"_target_": "os.system", "command": "touch ran"}),
    ("model", {"_target_": "shutil.copy", "src": "a", "dst": "b"}),
    ("model", {"_target_": "pathlib.Path.touch", "self": "ran"}),
    ("model", {"_target_": "builtins.exec", "_args_": ["1"]}),
    ("model", {"_target_": "functools.partial", "func": "os.system"}),
    ("model", {"_target_": "lit_fused.load", "path": "x", "trust": ["os.system"]}),
    ("model", {"_target_": "lit_fused.parallel.consolidate", "folder": "a", "file": "b"}),
    ("model", {"_target_": "lit_fused.parallel.checkpoint.torch.load", "f": "x"}),
    ("model", {"_target_": "lit_fused.atomic.remove", "path": "x"}),
    ("model", {"_target_": "lit_fused.callbacks.training_progress.os.system", "command": "x"}),
    ("model", {"_target_": "torch.optim.adam.torch.load", "f": "x"}),
    ("model", {"_target_": "torch.hub.load", "repo_or_dir": "x/y"}),
    ("model", {"_target_": "transformers.pipeline", "model": "x/y"}),
    ("model", {"_target_": "lightning.pytorch.cli.LightningCLI"}),
    ("model", {"_target_": "hydra.utils.get_method", "path": "os.system"}),
    ("model", {"_target_": "hydra.utils.instantiate", "config": {}}),
    ("model", {"_target_": ["os", "system"]}),
    ("model", {"_target_": "${prompt}"}),
    ("model", {"_target_": "transformers.AutoModelForCausalLM.from_pretrained", "trust_remote_code": True}),
    ("model", {"_target_": "transformers.AutoModelForCausalLM.from_pretrained", "weights_only": False}),
    ("model", {"_target_": "transformers.AutoModelForCausalLM.from_pretrained", "trust_remote_code": "${x}"}),
    ("model", {"_target_": "lit_fused.from_pretrained", "path": "x", "attn_implementation": "someone/kernels"}),
    ("model.config", {"_target_": "transformers.LlamaConfig", "auto_map": {"AutoModelForCausalLM": "a/b--c.D"}}),
    (
        "model",
        {"_target_": "peft.get_peft_model", "peft_config": {"_target_": "peft.LoraConfig", "megatron_core": "x"}},
    ),
    ("model", '${oc.decode:"{_target_: os.system, command: touch ran}"}'),
    ("model", "${oc.select:nothing,{_target_:os.system,command:x}}"),
    ("model", "${${prompt}:x}"),
    ("data.tokenizer", "${oc.create:{a:1}}"),
    ("loss.impl", "os.system"),
    ("loss.impl", "${metric}"),
    ("loss.impl", "${tags[0]}"),
    ("model", {"_target_": "peft.get_peft_model", "adapter_name": "/somewhere/else"}),
    ("callbacks.more", {"_target_": "lightning.pytorch.callbacks.LambdaCallback"}),
    ("callbacks.export.folder", "/somewhere/else"),
    ("callbacks.export.folder", "${output_dir}/../else"),
    ("callbacks.checkpoint.dirpath", "${oc.env:HOME}"),
    ("callbacks.checkpoint.filename", "../../else"),
    ("callbacks.checkpoint.filename", "\n/../../else"),
    ("callbacks.checkpoint.filename", "${tags[0]}"),
    ("callbacks.checkpoint.filename", "${oc.env:HOME}/else"),
    ("logger.csv.save_dir", ".."),
    ("logger.csv.name", "../../x"),
    ("logger.csv.version", "${metric}"),
    ("logger.tensorboard", {"_target_": "lightning.pytorch.loggers.TensorBoardLogger", "sub_dir": "/else"}),
    ("logger.mlflow", {"_target_": "lit_fused.app.mlflow_logger", "tracking_uri": "http://elsewhere"}),
    ("trainer.plugins", [{"_target_": "subprocess.run", "args": ["x"]}]),
]


@pytest.mark.parametrize(("path", "value"), ATTACKS)
def test_what_could_run_code_or_write_elsewhere_is_refused_in_one_sentence(path, value, tmp_path):
    content = OmegaConf.create(copy.deepcopy(CONFIG))
    OmegaConf.update(content, path, value, force_add=True, merge=False)
    run = saved(tmp_path, content)
    with pytest.raises(UserError, match=re.escape(str(run / ".hydra" / "config.yaml"))) as error:
        read_config(run)
    assert "\n" not in str(error.value)
    assert "if you trust it" in str(error.value)
    with pytest.raises(UserError), configuration_of(run):
        pass


def test_the_user_allows_a_class_by_its_name_and_a_value_by_giving_it(tmp_path):
    plain = {**CONFIG, "model": {"_target_": "mine.Model", "inner": {"_target_": "mine.Inner"}}}
    run = saved(tmp_path, plain)
    with pytest.raises(UserError, match="names mine.Inner.*trust=mine.Inner"):
        read_config(run, ["mine.Model"])
    assert read_config(run, ["mine.Model", "mine.Inner"])["model"]["_target_"] == "mine.Model"
    check_trusted(plain, run, ["mine.Model"], ["model.inner"])


def test_only_the_run_s_own_folder_is_looked_in(tmp_path):
    run = saved(tmp_path / "run", CONFIG)
    assert folder_of_run(run / "checkpoints" / "last.ckpt") == folder_of_run(run / "last.ckpt") == run
    assert folder_of_run(run / "downloads" / "last.ckpt") is None
    assert folder_of_run(run / "a" / "checkpoints" / "last.ckpt") is None
    assert run_of(run / "checkpoints" / "x.ckpt") == run


@pytest.mark.parametrize("text", ["a: [", "- 1", "{a: !!python/object/apply:os.system [x]}", "a: ${", "\x00"])
def test_a_broken_configuration_is_one_sentence(text, tmp_path):
    run = saved(tmp_path, {})
    (run / ".hydra" / "config.yaml").write_text(text)
    with pytest.raises(UserError, match="config.yaml") as error:
        read_config(run)
    assert "\n" not in str(error.value)


def laughs(levels: int) -> str:
    """YAML of some hundred bytes that stands for 9 to the power of ``levels`` words."""
    lines = ['a0: &a0 "ha"', *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels))]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (laughs(10), r"by an alias, \*a0"),
        ("a: &a {b: 1}\nc:\n  <<: *a", r"by an alias, \*a"),
        ("a: &a [*a]", r"by an alias, \*a"),
        ("a: " + "[" * 100_000, "more than 100 levels"),
        ("a: " + "{b: " * 5000 + "1" + "}" * 5000, "more than 100 levels"),
    ],
)
def test_yaml_that_stands_for_more_than_its_size_is_refused_before_it_is_built(text, reason, tmp_path):
    run = saved(tmp_path, CONFIG)
    (run / ".hydra" / "config.yaml").write_text(text)
    started = time.monotonic()
    with pytest.raises(UserError, match=rf"config.yaml cannot be read \(.*{reason}") as error:
        read_config(run)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=reason):
        continued([f"ckpt_path={run}/checkpoints/last.ckpt", "trainer.max_steps=2"], CONF)
    (run / ".hydra" / "overrides.yaml").write_text(f"- {text.splitlines()[0]}\n- {text}" if "\n" not in text else text)
    assert overrides_in(run / ".hydra") == []
    assert read_run(run).configuration == {}
    assert time.monotonic() - started < 20


def doubled(first: str, more: str) -> str:
    """A configuration of 40 entries, of which each names the one before it twice."""
    return "\n".join([f"a0: {first}", *(f"a{n}: {more.replace('A', f'a{n - 1}')}" for n in range(1, 40))])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (doubled("ha", "'${A}${A}'"), "10 times what it has written"),
        (doubled("ha", "'${ A } ${oc.select:A,1}'"), "10 times what it has written"),
        (doubled("ha", "['${A}', '${A}']"), "10 times what it has written"),
        (doubled("[ha]", "['${A[0]}${..A.0}']"), "10 times what it has written"),
        (doubled("{b: ha}", "{b: '${A}', c: '${oc.dict.values:A}'}"), "10 times what it has written"),
        ("a: '${a}'", "a is an interpolation of itself"),
        ("a: {b: '${a}'}", "a is an interpolation of itself"),
        ("a: b\nc: '${oc.select:${a}}'", "has no plain name"),
    ],
)
def test_interpolations_that_stand_for_more_than_their_size_are_refused_before_they_are_resolved(
    text, reason, tmp_path
):
    run = saved(tmp_path, CONFIG)
    file = run / ".hydra" / "config.yaml"
    file.write_text(f"{file.read_text()}\n{text}\n")
    with pytest.raises(UserError, match=rf"config.yaml cannot be read \(.*{reason}") as error:
        read_config(run)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=reason):
        continued([f"ckpt_path={run}/checkpoints/last.ckpt", "trainer.max_steps=2"], CONF)


def test_anchors_that_nothing_repeats_and_large_configurations_are_read(tmp_path):
    run = saved(tmp_path, CONFIG)
    file = run / ".hydra" / "config.yaml"
    file.write_text(f"{file.read_text()}tags: &tags [{', '.join(f'tag{n}' for n in range(20_000))}]\n")
    assert len(read_config(run)["tags"]) == 20_000


def test_transformers_own_auto_classes_of_a_run_never_ask_whether_code_may_run(tmp_path):
    target = "transformers.AutoModelForCausalLM.from_pretrained"
    model = {"_target_": "peft.get_peft_model", "model": {"_target_": target, "pretrained_model_name_or_path": "a/b"}}
    with configuration_of(saved(tmp_path, {**CONFIG, "model": model})) as cfg:
        assert cfg.model.model.trust_remote_code is False
    typed = OmegaConf.create({"model": {"_target_": target, "trust_remote_code": True}})
    refuse_code_of_folders(typed)
    assert typed.model.trust_remote_code is True
