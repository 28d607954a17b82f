"""Settings of every kind and type, for every key: each is refused in one sentence, or the run is valid."""

import math
import random
import re
import signal
from copy import deepcopy
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import SYNTHETIC, TINY_MODEL, train
from composed import composed
from hydra.errors import CompactHydraException
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from omegaconf import OmegaConf

from lit_fused import FusedCausalLMModule
from lit_fused.app.commands import MODES, run
from lit_fused.app.config import check_config
from lit_fused.errors import Stopped, UserError

TINY = [*TINY_MODEL, *SYNTHETIC, "trainer.max_steps=1", "trainer.accelerator=cpu", "trainer.limit_val_batches=1"]
KEYS = "module model data loss optimizer scheduler trainer callbacks logger generate plan score"
QUIET = ["~callbacks.sample_text", "~callbacks.export", "~callbacks.progress_bar", "trainer.enable_model_summary=false"]
VALUES = [-1, 0, 1, 2, 0.5, -0.5, math.nan, math.inf, 10**18, 10**30, 10**100, 1e300, "abc", "", True, False, None]
VALUES += [[], [1, 2], ["a"], {}, {"a": 1}]
# Two start as many processes; the other two run for as long as they are told to.
BY_OTHERS = ("trainer.devices", "trainer.val_check_interval")  # Lightning takes texts and mappings as well
LEFT_OUT = ("trainer.devices", "trainer.num_nodes", "trainer.max_steps", "trainer.max_epochs")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@cache
def content(*overrides: str, resolve: bool = True) -> dict[str, Any]:
    base = [word for word in TINY if not (overrides and word.startswith("data"))]
    found: Any = OmegaConf.to_container(composed(*base, *QUIET, *overrides), resolve=resolve)
    return found


def keys(node: Any, path: str = "") -> list[str]:
    if not isinstance(node, dict):
        return [path]
    return [key for name, value in node.items() if name[0] != "_" for key in keys(value, f"{path}.{name}".strip("."))]


def changed(key: str, value: Any, *overrides: str, resolve: bool = True) -> Any:
    found = OmegaConf.create(deepcopy(content(*overrides, resolve=resolve)))
    OmegaConf.update(found, key, value, merge=False, force_add=True)
    return found


def refusal(key: str, value: Any, *overrides: str) -> str:
    """The sentence of the check, which imports no torch; empty if it accepts the value."""
    try:
        check_config(changed(key, value, *overrides), MODES)
    except UserError as error:
        return str(error)
    return ""


def outcome(key: str, value: Any, folder: Path, *overrides: str) -> str:
    """The sentence with which a run ends; empty if it ends well. Whatever else it raises fails the test."""
    cfg = changed(key, value, *overrides, resolve=False)
    if key != "output_dir":
        cfg.output_dir = cfg.trainer.default_root_dir = cfg.logger.csv.save_dir = str(folder)
    cfg.callbacks.checkpoint.dirpath = str(folder / "checkpoints")
    try:
        run(cfg)
    except CompactHydraException as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("optimizer.lr", "abc", "must be a number, got 'abc'"),
        ("optimizer.lr", -1, "must be 0 or more, got -1"),
        ("optimizer.lr", math.nan, "must be a finite number, got nan"),
        ("optimizer.betas", [2, 3], "must be 0 or more and below 1, got 2"),
        ("optimizer.betas", [0.9], r"must be a list of 2, got \[0.9\]"),
        ("optimizer.weight_decay", math.inf, "must be a finite number, got inf"),
        ("scheduler.warmup_fraction", 2, "must be from 0 to 1, got 2"),
        ("scheduler.warmup_fraction", -1, "must be from 0 to 1, got -1"),
        ("seed", 10**20, "must be a number of at most 64 bits, got 1000"),
        ("seed", 2**32, "must be a whole number from 0 to 4294967295, got 4294967296"),
        ("trainer.accumulate_grad_batches", -1, "must be a whole number, 1 or more, got -1"),
        ("trainer.gradient_clip_val", -1, "must be 0 or more, got -1"),
        ("trainer.log_every_n_steps", -1, "must be a whole number, 0 or more, got -1"),
        ("trainer.limit_train_batches", 0, "must be a whole number of batches, 1 or more, or a share up to 1.0, got 0"),
        ("trainer.val_check_interval", 0, "must be a whole number of batches, 1 or more, or a share up to 1.0, got 0"),
        ("trainer.max_steps", 10**50, "must be a number of at most 64 bits, got one of more than 40 digits"),
        ("trainer.max_epochs", "abc", "must be a whole number or null, got 'abc'"),
        ("plan.memory_gib", math.nan, "must be a finite number, got nan"),
        ("model.config.num_hidden_layers", -1, "must be a whole number, 1 or more, got -1"),
        ("model.config.eos_token_id", 300, "must be below vocab_size=300, got 300"),
        ("model.config.eos_token_id", [0, 900], r"must be below vocab_size=300, got \[0, 900\]"),
        ("model.config.pad_token_id", 10**6, "must be below vocab_size=300, got 1000000"),
        ("callbacks.checkpoint", None, "must name a _target_, got None; take it out with '~callbacks.checkpoint'"),
        ("data.path", 5, "unknown"),
        ("output_dir", 5, "must be a text, got 5"),
    ],
)
def test_a_setting_out_of_range_or_of_another_type_is_refused_before_torch_is_imported(key, value, said):
    message = refusal(key, value)
    assert re.search(f"- {key}: {said}", message), message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.max_steps", -1),
        ("trainer.max_steps", 1e3),
        ("trainer.max_epochs", -1),
        ("trainer.max_epochs", None),
        ("trainer.limit_train_batches", 0.5),
        ("trainer.limit_val_batches", 1.0),
        ("trainer.limit_val_batches", 0),
        ("trainer.devices", "auto"),
        ("trainer.devices", -1),
        ("trainer.devices", [0, 1]),
        ("trainer.gradient_clip_val", None),
        ("trainer.gradient_clip_val", 0),
        ("trainer.val_check_interval", 0.25),
        ("trainer.val_check_interval", "00:10:00:00"),
        ("trainer.val_check_interval", {"minutes": 5}),
        ("trainer.num_sanity_val_steps", -1),
        ("trainer.log_every_n_steps", 0),
        ("trainer.precision", "bf16-mixed"),
        ("trainer.precision", 32),
        ("trainer.max_time", "00:00:10:00"),
        ("trainer.overfit_batches", 0.1),
        ("callbacks.checkpoint.save_top_k", -1),
        ("callbacks.checkpoint.save_last", "link"),
        ("model.config.pad_token_id", -1),
        ("optimizer.lr", 1),
        ("data.ignored_fraction", 0),
    ],
)
def test_what_lightning_and_torch_take_stays_legal(key, value):
    assert not refusal(key, value)


DATA = ["data=text", "data.path=corpus"]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), DATA], ids=["synthetic", "text"])
def test_the_check_says_a_sentence_or_nothing_for_every_key_and_value(overrides):
    base = OmegaConf.create(content(*overrides))
    for key in [key for key in keys(content(*overrides)) if not overrides or key.startswith("data.")]:
        is_number = type(OmegaConf.select(base, key)) in (int, float)
        for value in random.Random(key).sample(VALUES, 3):
            message = refusal(key, value, *overrides)
            is_wrong = isinstance(value, str | list | dict) or not abs(value or 0) <= 1e300 or value == 10**100
            if is_number and is_wrong and key not in BY_OTHERS and "model.config" not in key:
                assert f"- {key}: must be" in message, key


def test_a_reference_that_leads_nowhere_is_named(tmp_path):
    for key in ("model.config.hidden_size", "output_dir", "trainer.max_steps"):
        assert re.search(r": Interpolation key 'no.such.key' not found$", outcome(key, "${no.such.key}", tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model.config.num_key_value_heads", 3, r"^model: shape .* is invalid|^model: .*3"),
        ("model.config.num_attention_heads", 3, "^model.config: .*not a multiple of the number of attention heads"),
        ("model.config.hidden_size", 10**9, "^the memory does not suffice"),
        ("trainer.precision", "abc", "^trainer: Precision 'abc' is invalid"),
        ("trainer.accelerator", "abc", "^trainer: You selected an invalid accelerator name"),
        ("trainer.devices", 0, "^trainer: "),
        ("trainer.strategy", "fsdp", "^trainer: .*requires a GPU accelerator"),
        ("loss.impl", "abc", "impl='abc' is unknown"),
        ("trainer.gradient_clip_algorithm", "abc", "^trainer: `gradient_clip_algorithm` abc is invalid"),
    ],
)
def test_what_a_library_raises_before_the_first_step_is_a_sentence_about_its_node(key, value, said, tmp_path):
    message = outcome(key, value, tmp_path)
    assert re.search(said, message), message
    assert "\n" not in message.removeprefix("the configuration does not fit:\n  - ")


def test_a_fault_of_the_program_keeps_its_trace(tmp_path, monkeypatch):
    def broken(self, *_):
        raise ValueError("mine")

    monkeypatch.setattr(FusedCausalLMModule, "training_step", broken)
    with pytest.raises(ValueError, match="mine"):
        outcome("seed", 1, tmp_path)


def test_what_ends_a_run_while_its_data_are_opened_is_what_it_ends_with(tmp_path, monkeypatch):
    """Lightning raises another error when it ends a trainer whose loader was not begun."""

    def broken(self):
        raise errors.pop()

    errors = [Stopped(signal.SIGTERM), UserError("the disk is gone")]
    monkeypatch.setattr(CombinedLoader, "__iter__", broken)
    assert outcome("seed", 1, tmp_path) == "the disk is gone"
    with pytest.raises(Stopped):
        outcome("seed", 1, tmp_path)


def test_after_the_first_step_the_configuration_is_not_to_blame(tmp_path, monkeypatch):
    def step(self, *arguments, **options):
        steps.append(1)
        if len(steps) == 2:
            raise RuntimeError("the device is gone")
        return real(self, *arguments, **options)

    steps, real = [], torch.optim.AdamW.step
    step.__globals__["__name__"], name = "torch.optim.adamw", __name__
    try:
        monkeypatch.setattr(torch.optim.AdamW, "step", step)
        with pytest.raises(RuntimeError, match="the device is gone") as caught:
            outcome("trainer.max_steps", 3, tmp_path)
        assert caught.value.__notes__ == ["raised after 1 steps"]
        steps.append(1)
        steps[:] = [1]
        assert outcome("trainer.max_steps", 3, tmp_path).startswith("optimizer: the device is gone")
    finally:
        step.__globals__["__name__"] = name


def test_a_number_that_python_does_not_read_is_refused_on_the_command_line(tmp_path):
    done = train(tmp_path, "+seeds=" + "9" * 5000)
    assert done.status == 1
    assert done.output == "a number on the command line has more than 4,300 digits, which Python does not read\n"


@pytest.mark.parametrize(("devices", "gpus"), [(8, 0), (8, 2), ([0, 5], 2)])
def test_devices_that_are_not_there_are_one_sentence(devices, gpus, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    said = outcome("trainer.devices", devices, tmp_path, "trainer.accelerator=gpu")
    expected = r"You requested gpu: .* machine only has: \[0, 1\]" if gpus else "No supported gpu backend found"
    assert re.match(rf"trainer: {expected}\. Change what was chosen", said), said
    assert "\n" not in said


@pytest.mark.slow
@pytest.mark.parametrize("group", list(KEYS.split()))
def test_every_key_with_every_value_ends_in_a_sentence_or_in_a_valid_run(group, tmp_path):
    """Try two of the values that the check accepts for each key; which ones depends on the key alone."""
    for key in (key for key in keys(content()[group], group) if key not in LEFT_OUT):
        shuffled = random.Random(key).sample(VALUES, len(VALUES))
        for value in islice((value for value in shuffled if not refusal(key, value)), 2):
            assert "\n" not in outcome(key, value, tmp_path), (key, value)
