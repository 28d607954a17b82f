"""The configuration: what is wrong with it is listed at once, with its path, before anything heavy is built."""

import inspect
import re
from typing import Any

import pytest
import yaml
from composed import CONF, composed
from hydra.utils import get_class, instantiate

from lit_fused import UserError
from lit_fused.app.commands import MODES
from lit_fused.app.config import check_config
from lit_fused.objectives.preference import OBJECTIVES as PREFERENCES

OPTIONS = {
    str(group.relative_to(CONF)): sorted(file.stem for file in group.glob("*.yaml"))
    for group in sorted(CONF.rglob("*"))
    if group.is_dir() and group.name != "base"  # what files of data have in common
}


def test_a_parameter_of_any_kind_takes_what_is_given():
    check_config(composed("logger=wandb", "tags=[baseline,2]"), MODES)


# A composition takes a seventh of a second: two files of each group are met in the quick suite.
CELLS = [
    pytest.param(group, option, marks=() if place < 2 else pytest.mark.slow)
    for group, options in OPTIONS.items()
    for place, option in enumerate(options)
]


@pytest.mark.parametrize(("group", "option"), CELLS)
def test_every_file_of_the_tree_composes_and_fits(group, option):
    needed = {name: ["model.path=somewhere"] for name in ("pretrained", "drafter")}
    needed |= {"tokens": ["data.path=somewhere.bin", "data.vocab_size=50257"]}
    paths = ("chat", "hf", "instruction", "pairs", "preference", "rollouts", "text")
    needed |= {name: ["data.path=somewhere"] for name in paths}
    needed |= {name: ["module=policy"] for name in ("reinforce", "rloo", "grpo", "dr_grpo", "dapo", "ppo", "cispo")}
    recipes = ("continue_pretraining", "chat_fine_tuning", "lora", "dpo", "long_context")
    if group == "experiment":
        needed |= {name: ["model.path=somewhere", "data.path=somewhere"] for name in recipes}
    needed["interactions"] = ["data.path=somewhere", "module=recommender"]
    needed["reverse"] = ["data.path=somewhere"]
    needed["exported_items"] = ["model.path=somewhere"]
    needed["early_stopping"] = ["trainer.max_epochs=3"]
    place = "teacher" if group == "teacher" else "model"
    extra = [word.replace("model.", f"{place}.") for word in needed.get(option, [])]
    check_config(composed(f"{group}={option}", *extra), MODES)


@pytest.mark.parametrize(
    ("overrides", "faults"),
    [
        (
            ["+loss.chunk_sz=1"],
            ["loss.chunk_sz: unknown .did you mean chunk_size.*LinearCrossEntropyLoss takes .*logits_b"],
        ),
        (
            ["+model.config.hiden_size=8"],
            ["model.config.hiden_size: unknown .did you mean hidden_size.*transformers.LlamaConfig takes "],
        ),
        (
            [
                *("experiment=reverse", "data.path=a.jsonl", "+model.config.decoder_start_token=1"),
                "model.config.decoder_start_token_id=0",
            ],
            ["model.config.decoder_start_token: unknown .did you mean decoder_start_token_id.*T5Config takes "],
        ),
        (["~loss"], ["loss: missing; the run needs it, see conf/train.yaml"]),
        (["+experiment.seed=2"], ["experiment: unknown.*first line # @package _global_"]),
        (["~data.batch_size", "+callbacks.checkpoint.every=2"], ["callbacks.checkpoint.every: unknown"]),
        (["~callbacks.export.folder"], ["callbacks.export.folder: missing"]),
        (["optimizer._target_=torch.optim.Adamm"], ["optimizer._target_: cannot import torch.optim.Adamm"]),
        (
            ["+foo=1", "+bar=2", "data=text", "mode=x"],
            ["foo: unknown", "bar: unknown", "data.path: has no value", "mode: must"],
        ),
    ],
)
def test_a_wrong_configuration_is_refused_with_every_fault_and_its_path(overrides, faults):
    with pytest.raises(UserError) as caught:
        check_config(composed(*overrides), MODES)
    for fault in faults:
        assert re.search(fault, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("loss", OPTIONS["loss"])
def test_every_loss_file_builds_its_loss(loss):
    built: Any = instantiate(composed(f"loss={loss}").loss)
    backend = "chunked" if loss in ("distillation", "policy") else loss
    assert getattr(getattr(built, "backend", None), "__name__", backend) == backend


# These are what a file is for, and so differ from the defaults of its class.
CHOSEN = {"impl", "objective", ("dr_grpo", "length")}


@pytest.mark.parametrize("file", [*CONF.glob("loss/*.yaml"), *CONF.glob("objective/*.yaml")], ids=lambda f: f.stem)
def test_what_a_loss_file_says_is_the_default_of_its_class(file):
    options: Any = yaml.safe_load(file.read_text())
    target = options.pop("_target_", "lit_fused.PolicyLoss")
    functions: list[Any] = [get_class(target).__init__]
    if file.stem in PREFERENCES:
        functions.append(PREFERENCES[file.stem].function)
    defaults = {name: p.default for f in functions for name, p in inspect.signature(f).parameters.items()}
    options = {name: value for name, value in options.items() if not {name, (file.stem, name)} & CHOSEN}
    assert options == {name: defaults[name] for name in options}


def test_the_filtered_loss_has_options_of_the_chunked_one_and_its_backend_one_of_its_own():
    built: Any = instantiate(composed("loss=filtered", "loss.impl.filter_eps=0.01").loss)
    assert built.backend.filter_eps == 0.01
    assert set(composed("loss=filtered").loss) < set(composed("loss=chunked").loss)
