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
from checkpoint_fits import RANK, RANKS, train, weights_of
from commands import ROOT, SYNTHETIC, TINY_MODEL, environment
from commands import train as run_training
from errors_of import relative_error
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning_helpers import loader, quiet_trainer
from parallel_cases import PER_STEP, backbone, batches
from peft import LoraConfig, get_peft_model
from ranks import Counted, each, statuses_of
from safetensors.torch import load_file, save_file
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM

from lit_fused import FusedCausalLMModule, UserError
from lit_fused.atomic import is_whole, newest_in, put_in_place, written_whole
from lit_fused.parallel import FSDP2Strategy
from lit_fused.parallel.checkpoint import in_groups, names_of_groups, read_checkpoint, read_weights, with_names
from lit_fused.parallel.collectives import local, objects_of_ranks

WRITTEN = ["ddp-2", "fsdp2-2", "fsdp2-4", "tp-2", "fsdp2_rows-2"]
RESUMED_BY_FOUR = ["fsdp2-2>fsdp2", "fsdp2-2>ddp", "ddp-2>fsdp2", "fsdp2_rows-2>fsdp2", "fsdp2-2>fsdp2_rows"]
RESUMED_BY_TWO = ["tp-2>fsdp2", "tp-2>ddp", "fsdp2-2>tp", "ddp-2>tp", "fsdp2-4>fsdp2", "fsdp2-2>ddp"]


REFUSED = {
    "ddp-2>fsdp2+qwen3": "is of another model: .* use the model configuration that it was",
    "fsdp2-2>fsdp2+qwen3": "is of another model: .* use the model configuration that it was",
    "weights_of_ddp-2>fsdp2": "has weights alone .*from which training cannot go on as it was",
    "weights_of_fsdp2-2>fsdp2": "has weights alone .*from which training cannot go on as it was",
}


def write(strategy: str, folder: Path) -> None:
    """Train two epochs, and write FOLDER/STRATEGY-RANKS.ckpt; "weights_of_STRATEGY" saves weights alone."""
    name, strategy = f"{strategy}-{RANKS}", strategy.removeprefix("weights_of_")
    saver = ModelCheckpoint(folder, filename=name, save_weights_only=name.startswith("weights_of_"))
    train(strategy, folder, epochs=2, enable_checkpointing=True, callbacks=[saver])


def go_on(item: str, folder: Path) -> dict[str, torch.Tensor]:
    """Train the third epoch from CHECKPOINT>STRATEGY[+MODEL]."""
    source, strategy = item.split(">")
    strategy, _, model = strategy.partition("+")
    trainer, module = train(strategy, folder, 3, model or "llama_tied", ckpt_path=folder / f"{source}.ckpt")
    assert trainer.global_step == 6
    return weights_of(trainer, module)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_run_goes_on_exactly_under_any_other_strategy_and_number_of_ranks(tmp_path):
    """Two epochs before the checkpoint and one after it are three at once in float64."""
    each(write, 2, ["ddp", "fsdp2", "tp", "fsdp2_rows", "weights_of_ddp", "weights_of_fsdp2"], tmp_path)
    each(write, 4, ["fsdp2"], tmp_path)
    found = each(go_on, 4, RESUMED_BY_FOUR, tmp_path) | each(go_on, 2, [*RESUMED_BY_TWO, *REFUSED], tmp_path)
    for item, message in REFUSED.items():
        assert re.search(message, found.pop(item)), item
    found |= {f"{source}>auto": go_on(f"{source}>auto", tmp_path) for source in WRITTEN}
    truth = weights_of(*train("auto", tmp_path, epochs=3, precision="64-true"))
    assert max(relative_error(weights, truth) for weights in found.values()) < 1e-6
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".partial", ".previous")]


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


class DiesInStep(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, *_: object, **__: object) -> None:
        if trainer.global_step == 5 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def die_in_step(rank: int, folder: Path) -> None:
    """Rank 1 is gone in the middle of the third epoch."""
    saver = ModelCheckpoint(folder / "run", filename="{epoch}", save_last=True)
    train("ddp", folder, 100, enable_checkpointing=True, callbacks=[saver, DiesInStep()])


def die_in_save(rank: int, folder: Path) -> None:
    """Rank 0 is gone at the end of the third epoch, in the middle of the last file that it saves."""
    whole_save, count = torch.save, 0

    def save(content: object, file: Any, *arguments: Any, **options: Any) -> None:
        nonlocal count
        count += isinstance(file, Path)
        if count == 6:  # of two an epoch
            file.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        whole_save(content, file, *arguments, **options)

    if rank == 0:
        torch.save = save
    saver = ModelCheckpoint(folder / "run", filename="{epoch}", save_last=True)
    train("fsdp2", folder, 100, enable_checkpointing=True, callbacks=[saver])


@pytest.mark.slow
@pytest.mark.parametrize(("death", "victim", "epoch"), [(die_in_save, 0, 2), (die_in_step, 1, 1)])
def test_when_a_rank_is_killed_the_last_checkpoint_is_whole(death, victim, epoch, tmp_path):
    assert statuses_of(death, 2, tmp_path, timeout=100)[victim] == -signal.SIGKILL
    left = {path.name for path in (tmp_path / "run").iterdir()}
    left.discard("last.ckpt.partial")  # A rank that notices the death while it saves removes it.
    assert left == {f"epoch={epoch}.ckpt", "last.ckpt"}
    resumed = train("auto", tmp_path, epochs=3, ckpt_path=tmp_path / "run" / "last.ckpt")
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
    assert read_checkpoint(path)["global_step"] == 3
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


def agree(strategy: str, folder: Path) -> Any:
    """Return what each rank thinks of a run that gets worse, whose ranks validate with different data.

    Rank 1 has no valid label in its first batch, on which the spot check runs the model.
    """
    share = batches()[: 2 * PER_STEP][RANK::RANKS]
    stopping = EarlyStopping("val/loss", patience=1)
    best = ModelCheckpoint(folder / strategy, monitor="val/loss", filename="{epoch}")
    _, module = train(
        strategy,
        folder,
        8,
        data=(share[-1:] + share[:-1], share[:1]),
        rate=0.3,
        enable_checkpointing=True,
        callbacks=[stopping, best],
    )
    with torch.no_grad():
        own = module.compute_loss(share[0])
    opinion = {
        "own": (own.loss_sum / own.num_tokens).item(),
        "stopped": stopping.stopped_epoch,
        "best": str(best.best_model_path),
        "score": None if best.best_model_score is None else best.best_model_score.item(),
    }
    return objects_of_ranks(opinion)


@pytest.mark.slow
def test_ranks_with_different_losses_agree_when_to_stop_and_what_is_best(tmp_path):
    for one, other in each(agree, 2, ["ddp", "fsdp2"], tmp_path).values():
        assert one.pop("own") != other.pop("own")
        assert one == other
        assert 0 < one["stopped"] < 7
        assert Path(one["best"]).exists()


def adapters(strategy: str, folder: Path) -> None:
    """Train LoRA on the layers and the output layer, and export it."""
    torch.manual_seed(0)
    targets = ["q_proj", "down_proj", "lm_head"]
    model = get_peft_model(backbone("llama"), LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=targets))
    _, module = train(strategy, folder, 1, model)
    module.save_pretrained(folder / f"lora-{strategy}")


@pytest.mark.slow
def test_adapters_of_a_sharded_model_are_exported_as_those_of_a_whole_one(tmp_path):
    each(adapters, 2, ["fsdp2"], tmp_path)
    adapters("auto", tmp_path)
    whole, sharded = tmp_path / "lora-auto", tmp_path / "lora-fsdp2"
    files = sorted(path.relative_to(whole) for path in whole.rglob("*"))
    assert sorted(path.relative_to(sharded) for path in sharded.rglob("*")) == files
    weights = [file for file in files if file.suffix == ".safetensors"]
    assert len(weights) == 2
    for file in weights:
        assert relative_error(load_file(sharded / file), load_file(whole / file)) < 1e-6


def reductions(strategy: str, folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Return how often the gradients of an epoch were reduced, and the weights after three."""
    with Counted("reduce_scatter") as counted:
        trained = train(strategy, folder, 3)
    return counted.count // 3, weights_of(*trained)


@pytest.mark.slow
def test_gradients_reduced_once_per_step_are_those_reduced_in_every_micro_batch(tmp_path):
    often, once = each(reductions, 2, ["fsdp2", "fsdp2_once"], tmp_path).values()
    units, steps, accumulated = 2, 2, 2  # the layers, which are small, and the root
    assert (often[0], once[0]) == (units * steps * accumulated, units * steps)
    truth = weights_of(*train("auto", tmp_path, epochs=3, precision="64-true"))
    assert relative_error(often[1], truth) < 1e-6
    assert relative_error(once[1], truth) < 1e-6


@pytest.mark.slow
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
    run_training(tmp_path, *overrides, f"ckpt_path={last}", "trainer.max_steps=20", "hydra.run.dir=resumed")


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.gpu
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
