"""Checkpoints that move between strategies and numbers of ranks, and that appear whole or not at all."""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import forked
import lightning as L
import pytest
import torch
from checkpoint_job import train, weights_of
from commands import ROOT, SYNTHETIC, TINY_MODEL, environment
from commands import train as run_training
from errors_of import relative_error
from lightning_helpers import loader, quiet_trainer
from parallel_cases import backbone, batches
from safetensors.torch import load_file, save_file
from torch.optim import AdamW
from torchrun import run, run_whatever_comes, torchrun
from transformers import LlamaConfig, LlamaForCausalLM

from lit_fused import FusedCausalLMModule, UserError
from lit_fused.atomic import is_whole, newest_in, put_in_place, written_whole
from lit_fused.parallel import FSDP2Strategy
from lit_fused.parallel.checkpoint import (
    consolidate,
    in_groups,
    names_of_groups,
    read_checkpoint,
    read_weights,
    with_names,
)
from lit_fused.parallel.collectives import local

JOB = Path(__file__).parents[1] / "helpers" / "checkpoint_job.py"


def launch(ranks: int, folder: Path, *items: str, timeout: float = 150) -> None:
    run(JOB, ranks, folder, *items, timeout=timeout)


WRITTEN = ["ddp-2", "fsdp2-2", "fsdp2-4", "tp-2"]
RESUMED_BY_FOUR = ["fsdp2-2>fsdp2", "fsdp2-2>ddp", "ddp-2>fsdp2"]
RESUMED_BY_TWO = [
    "tp-2>fsdp2",
    "tp-2>ddp",
    "fsdp2-2>tp",
    "ddp-2>tp",
    "fsdp2-4>fsdp2",
    "fsdp2-2>ddp",
]


REFUSED = {
    "ddp-2>fsdp2+qwen3": "is of another model: .* use the model configuration that it was",
    "fsdp2-2>fsdp2+qwen3": "is of another model: .* use the model configuration that it was",
    "weights_of_ddp-2>fsdp2": "has weights alone .*from which training cannot go on as it was",
    "weights_of_fsdp2-2>fsdp2": "has weights alone .*from which training cannot go on as it was",
}


def errors_of(folder: Path, two: list[str], sources: list[str], *, four: list[str] | None = None) -> dict[str, float]:
    """Compare the weights after three epochs, two before the checkpoint and one after, with three at once in float64.

    Args:
        folder: where the checkpoints are.
        two, four: CHECKPOINT>STRATEGY for as many ranks.
        sources: checkpoints that a single device resumes from.
    """
    truth = weights_of(*train("auto", folder, epochs=3, precision="64-true"))
    errors = {
        item: relative_error(torch.load(folder / f"{item}-{ranks}.pt"), truth)
        for ranks, items in ((2, two), (4, four or []))
        for item in items
    }
    for source in sources:
        resumed = train("auto", folder, epochs=3, ckpt_path=folder / f"{source}.ckpt")
        errors[f"{source}>auto"] = relative_error(weights_of(*resumed), truth)
    return errors


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_run_goes_on_exactly_under_any_other_strategy_and_number_of_ranks(tmp_path):
    launch(2, tmp_path, "ddp", "fsdp2", "tp")
    launch(4, tmp_path, "fsdp2", *RESUMED_BY_FOUR)
    launch(2, tmp_path, *RESUMED_BY_TWO)
    errors = errors_of(tmp_path, RESUMED_BY_TWO, WRITTEN, four=RESUMED_BY_FOUR)
    assert max(errors.values()) < 1e-6, errors


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_goes_on_exactly_under_another_strategy(tmp_path):
    launch(2, tmp_path, "ddp", "fsdp2", "weights_of_ddp", "weights_of_fsdp2")
    quick = ["fsdp2-2>ddp", "ddp-2>fsdp2"]
    launch(2, tmp_path, *quick, *REFUSED)
    errors = errors_of(tmp_path, quick, ["ddp-2", "fsdp2-2"])
    assert max(errors.values()) < 1e-6, errors
    for item, message in REFUSED.items():
        assert re.search(message, torch.load(tmp_path / f"{item}-2.pt")), item
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".partial", ".previous")]

    folder = tmp_path / "fsdp2-2.ckpt"
    (folder / "meta.pt").unlink()
    with pytest.raises(UserError, match=r"is a folder without meta.pt, and no checkpoint"):
        train("auto", tmp_path, epochs=3, ckpt_path=folder)


def trained() -> tuple[FusedCausalLMModule, AdamW]:
    """A module and an optimiser whose groups are in another order than the model, with a state."""
    module = FusedCausalLMModule(backbone("llama"))
    parameters = list(module.parameters())
    optimizer = AdamW([{"params": parameters[3:]}, {"params": parameters[:3], "weight_decay": 0.0}])
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer.step()
    return module, optimizer


def test_an_optimisers_state_finds_its_parameters_by_name_whatever_the_order():
    module, optimizer = trained()
    named = with_names(optimizer.state_dict(), names_of_groups(module, optimizer))
    parameters = [*module.parameters()]
    other = AdamW([{"params": parameters[:3][::-1], "weight_decay": 0.5}, {"params": parameters[3:][::-1]}])
    other.load_state_dict(in_groups(named, names_of_groups(module, other)))
    for p in parameters:
        assert torch.equal(other.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])
    assert [group["weight_decay"] for group in other.param_groups] == [0.0, 0.01]


def test_a_state_without_a_parameter_that_is_trained_is_refused_by_its_name():
    module, optimizer = trained()
    groups = names_of_groups(module, optimizer)
    named = with_names(optimizer.state_dict(), groups)
    name = named["param_groups"][1]["params"].pop()
    with pytest.raises(UserError, match=f"did not train {name} .* freeze the same parameters"):
        in_groups(named, [*names_of_groups(module, optimizer)[:1], [name]])


def test_a_file_takes_the_place_of_another_only_when_it_is_whole(tmp_path):
    path = tmp_path / "last.ckpt"
    path.write_bytes(b"whole")

    def half() -> None:
        with written_whole(path) as partial:
            partial.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half()
    assert path.read_bytes() == b"whole"
    with written_whole(path) as partial:
        partial.write_bytes(b"another")
    assert path.read_bytes() == b"another"
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.slow
@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    ("death", "strategy"),
    [
        ("die_in_save", "fsdp2"),
        ("die_in_step", "ddp"),
    ],
)
def test_when_a_rank_is_killed_the_others_end_and_the_last_checkpoint_is_whole(death, strategy, tmp_path):
    if death == "die_in_step":
        status, output = torchrun(JOB, 2, tmp_path, f"{death}={strategy}", timeout=100)
        assert status != 0
        assert "SIGKILL" in output
    else:
        statuses, output = run_whatever_comes(JOB, 2, tmp_path, f"{death}={strategy}", timeout=100)
        assert statuses[0] == -signal.SIGKILL, output
    left = {path.name for path in (tmp_path / strategy).iterdir()}
    left.discard("last.ckpt.partial")  # A rank that notices the death while it saves removes it.
    assert left == ({"epoch=2.ckpt", "last.ckpt"} if death == "die_in_save" else {"epoch=1.ckpt", "last.ckpt"})
    resumed = train("auto", tmp_path, epochs=3, ckpt_path=tmp_path / strategy / "last.ckpt")
    truth = weights_of(*train("auto", tmp_path, epochs=3, precision="64-true"))
    assert relative_error(weights_of(*resumed), truth) < 1e-6


def test_a_folder_takes_the_place_of_a_folder_or_a_file_whatever_an_interrupted_run_left(tmp_path):
    path, partial, previous = (tmp_path / f"last.ckpt{suffix}" for suffix in ("", ".partial", ".previous"))
    for number, left in enumerate(("nothing", "a file", "a folder", "an older folder", "that one alone")):
        if left == "a file":
            shutil.rmtree(path)
            path.write_text("old")
        if left == "an older folder":
            shutil.copytree(path, previous)
        if left == "that one alone":
            path.rename(previous)
        partial.mkdir()
        (partial / "content").write_text(str(number))
        put_in_place(partial, path)
        assert (path / "content").read_text() == str(number)
        assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_folder_that_a_killed_run_moved_aside_is_read_where_it_lies(tmp_path):
    path, previous = tmp_path / "last.ckpt", tmp_path / "last.ckpt.previous"
    previous.mkdir()
    save_file({"state_dict.weight": torch.ones(3)}, previous / "shard-00001-model-00001-of-00001.safetensors")
    torch.save({"global_step": 3}, previous / "meta.pt")
    assert read_weights(path)["weight"].tolist() == [1, 1, 1]
    assert newest_in(tmp_path) == path
    consolidate(path, tmp_path / "file.ckpt")
    assert read_checkpoint(tmp_path / "file.ckpt")["global_step"] == 3
    (previous / "meta.pt").unlink()  # a half is no checkpoint
    assert not is_whole(path)


def test_training_goes_on_while_a_checkpoint_is_written_and_the_file_has_the_weights_of_its_step(tmp_path, monkeypatch):
    write, weights, steps_meanwhile = torch.save, [], []

    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any, **__: Any) -> None:
            if trainer.global_step == 1:
                weights.extend(p.detach().clone() for p in module.parameters())
                trainer.save_checkpoint(tmp_path / "first.ckpt")

    def slow(*arguments: Any, **options: Any) -> None:
        deadline = time.monotonic() + 20
        while trainer.global_step < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        steps_meanwhile.append(trainer.global_step)
        write(*arguments, **options)

    monkeypatch.setattr(torch, "save", slow)
    module = FusedCausalLMModule(backbone("llama"))
    trainer = quiet_trainer(tmp_path, max_steps=4, callbacks=[Saves()])
    trainer.fit(module, loader(batches()[:8]))
    assert steps_meanwhile[0] >= 3
    saved = module.__class__.load_from_checkpoint(tmp_path / "first.ckpt", backbone=backbone("llama"))
    assert all(torch.equal(p, q) for p, q in zip(saved.parameters(), weights, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_ranks_with_different_losses_agree_when_to_stop_and_what_is_best(tmp_path):
    launch(2, tmp_path, "agree=ddp", "agree=fsdp2")
    for strategy in ("ddp", "fsdp2"):
        one, other = torch.load(tmp_path / f"agree={strategy}-2.pt")
        assert one.pop("own") != other.pop("own")
        assert one == other
        assert 0 < one["stopped"] < 7
        assert Path(one["best"]).exists()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_adapters_of_a_sharded_model_are_exported_as_those_of_a_whole_one(tmp_path):
    launch(2, tmp_path, "adapters=fsdp2")
    _, module = train("auto", tmp_path, 1, "lora")
    module.save_pretrained(tmp_path / "lora-auto")
    files = sorted(path.relative_to(tmp_path / "lora-auto") for path in (tmp_path / "lora-auto").rglob("*"))
    weights = [file for file in files if file.suffix == ".safetensors"]
    assert len(weights) == 2
    exported = tmp_path / "lora-fsdp2"
    assert sorted(path.relative_to(exported) for path in exported.rglob("*")) == files
    for file in weights:
        assert relative_error(load_file(exported / file), load_file(tmp_path / "lora-auto" / file)) < 1e-6


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_text_written_before_training_does_not_change_what_is_saved(tmp_path):
    launch(2, tmp_path, "generated=fsdp2")
    without, with_text = torch.load(tmp_path / "generated=fsdp2-2.pt")
    for name, weight in without.items():
        assert torch.equal(weight, with_text[name]), name


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_gradients_reduced_once_per_step_are_those_reduced_in_every_micro_batch(tmp_path):
    launch(2, tmp_path, "reductions=fsdp2", "reductions=fsdp2_once")
    often, once = (torch.load(tmp_path / f"reductions={name}-2.pt") for name in ("fsdp2", "fsdp2_once"))
    units, steps, accumulated = 2, 2, 2  # the layers, which are small, and the root
    assert often["count"] == units * steps * accumulated
    assert once["count"] == units * steps
    truth = weights_of(*train("auto", tmp_path, epochs=3, precision="64-true"))
    assert relative_error(often["weights"], truth) < 1e-6
    assert relative_error(once["weights"], truth) < 1e-6


@pytest.mark.slow
@pytest.mark.timeout(250)
@pytest.mark.parametrize("victim", ["child", "parent"])
def test_under_lightnings_own_launcher_too_a_killed_rank_ends_the_run(victim, tmp_path):
    """The parent is rank 0 and has started rank 1."""
    overrides = [*SYNTHETIC, *TINY_MODEL, "data.num_train_batches=5000", "callbacks.checkpoint.every_n_train_steps=10"]
    several = ["strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu", "trainer.strategy.timeout.minutes=1"]
    last = tmp_path / "out" / "checkpoints" / "last.ckpt"
    words = [*overrides, *several, "trainer.max_steps=5000", "hydra.run.dir=out"]
    place = {"cwd": tmp_path, "env": environment(tmp_path), "output": tmp_path / "log.txt"}
    parent = forked.start(ROOT / "train.py", words, **place)
    child = None
    try:
        wait_for(last.exists, 150)
        (child,) = map(int, Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split())
        os.kill(child if victim == "child" else parent.pid, signal.SIGKILL)
        wait_for(lambda: parent.poll() is not None, 90)
        assert parent.status != 0
        wait_for(lambda: not Path(f"/proc/{child}").exists(), 90)
    finally:
        parent.stop()
        if child is not None and Path(f"/proc/{child}").exists():
            os.kill(child, signal.SIGKILL)
    finished = run_training(tmp_path, *overrides, f"ckpt_path={last}", "trainer.max_steps=20", "hydra.run.dir=resumed")
    assert finished.status == 0, finished.output


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
def test_a_gpu_that_copies_beside_the_next_step_saves_the_state_of_its_own(strategy, tmp_path):
    """A thousand million bytes take longer to copy than the next forward pass."""
    states = list[dict[str, torch.Tensor]]()

    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any, **__: Any) -> None:
            states.append({name: local(p.detach()).clone() for name, p in module.named_parameters()})
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    config = LlamaConfig(vocab_size=65536, hidden_size=1024, intermediate_size=2048, num_hidden_layers=4)
    module = FusedCausalLMModule(LlamaForCausalLM(config), optimizer=partial(torch.optim.AdamW, lr=1e-3))
    options = {
        "accelerator": "gpu",
        "precision": "bf16-mixed",
        "strategy": FSDP2Strategy() if strategy == "fsdp2" else strategy,
    }
    trainer = quiet_trainer(tmp_path, max_steps=4, callbacks=[Saves()], **options)
    trainer.fit(module, loader(batches()[:8]))
    for step, state in enumerate(states, 1):
        saved = read_checkpoint(tmp_path / f"{step}.ckpt")
        assert all(torch.equal(saved["state_dict"][name], weight.cpu()) for name, weight in state.items())
        assert {int(own["step"]) for own in saved["optimizer_states"][0]["state"].values()} == {step}
