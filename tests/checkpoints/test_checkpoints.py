"""Checkpoints that move between strategies and numbers of ranks, and that appear whole or not at all."""

import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from checkpoint_job import train, weights_of
from commands import ROOT, SYNTHETIC, TINY_MODEL, environment
from commands import train as run_training
from errors_of import relative_error
from parallel_cases import backbone
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import AdamW
from torchrun import run, run_whatever_comes, torchrun

from lit_fused import FusedCausalLMModule, UserError
from lit_fused.checkpoints.movable import MovableCheckpointIO, consolidate
from lit_fused.checkpoints.reading import CheckpointFolder, read_folder, read_weights
from lit_fused.checkpoints.resuming import (
    named_optimizer_state,
    numbered_optimizer_state,
    numbering,
)
from lit_fused.checkpoints.whole_or_not import check_whole, checkpoint_fault, put_in_place, written_whole

JOB = Path(__file__).parents[1] / "helpers" / "checkpoint_job.py"


def launch(ranks: int, folder: Path, *items: str, timeout: float = 150) -> None:
    run(JOB, ranks, folder, *items, timeout=timeout)


WRITTEN = ["ddp-2", "fsdp2-2", "fsdp2_file-2", "fsdp2-4", "tp-2"]
RESUMED_BY_FOUR = ["fsdp2-2>fsdp2", "fsdp2-2>ddp", "ddp-2>fsdp2"]
RESUMED_BY_TWO = [
    "tp-2>fsdp2",
    "tp-2>ddp",
    "fsdp2-2>tp",
    "ddp-2>tp",
    "flat-2>tp",
    "flat-2>fsdp2",
    "flat-2>ddp",
    "fsdp2-4>fsdp2",
    "fsdp2-2>ddp",
    "ddp-2>fsdp2_file",
    "fsdp2_file-2>fsdp2",
    "ddp-2>lightnings_fsdp2",
    "fsdp2-4>lightnings_fsdp2",
]


def save_flat(checkpoint: dict[str, Any], folder: Path) -> None:
    """As a strategy does whose ranks have different parameters: each entry of the optimiser's state by itself."""
    (optimizer,) = checkpoint.pop("optimizer_states")
    flat = {f"state.{n}.{key}": value for n, state in optimizer["state"].items() for key, value in state.items()}
    for group in optimizer["param_groups"]:
        names = group.pop("params")
        flat |= {f"param_groups.{name}.{key}": value for name in names for key, value in group.items()}
    save({"state_dict": checkpoint.pop("state_dict"), "optimizer_0": flat}, checkpoint_id=folder, no_dist=True)
    torch.save(checkpoint, folder / "meta.pt")


REFUSED = {
    "ddp-2>fsdp2+qwen3": "is of another model: .* parameters differ .*use the model configuration that it was",
    "fsdp2-2>fsdp2+qwen3": "is of another model: .* parameters differ .*use the model configuration that it was",
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
    launch(2, tmp_path, "ddp", "fsdp2", "fsdp2_file", "tp")
    launch(4, tmp_path, "fsdp2", *RESUMED_BY_FOUR)
    save_flat(read_folder(tmp_path / "fsdp2-2.ckpt"), tmp_path / "flat-2.ckpt")
    launch(2, tmp_path, *RESUMED_BY_TWO)
    errors = errors_of(tmp_path, RESUMED_BY_TWO, WRITTEN, four=RESUMED_BY_FOUR)
    assert max(errors.values()) < 1e-6, errors


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_goes_on_exactly_under_another_strategy(tmp_path):
    launch(2, tmp_path, "ddp", "fsdp2", "weights_of_ddp", "weights_of_fsdp2")
    save_flat(read_folder(tmp_path / "fsdp2-2.ckpt"), tmp_path / "flat-2.ckpt")
    quick = ["fsdp2-2>ddp", "ddp-2>fsdp2", "flat-2>fsdp2", "ddp-2>lightnings_fsdp2"]
    launch(2, tmp_path, *quick, *REFUSED)
    errors = errors_of(tmp_path, quick, ["ddp-2", "fsdp2-2", "flat-2"])
    assert max(errors.values()) < 1e-6, errors
    for item, message in REFUSED.items():
        assert re.search(message, torch.load(tmp_path / f"{item}-2.pt")), item
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".partial", ".previous")]

    folder = tmp_path / "fsdp2-2.ckpt"
    (folder / "meta.pt").unlink()
    with pytest.raises(UserError, match=r"is a folder without meta.pt, not a whole checkpoint"):
        train("auto", tmp_path, epochs=3, ckpt_path=folder)
    with pytest.raises(UserError, match=r"is a folder without meta.pt, not a whole checkpoint"):
        read_folder(folder)


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
    named = named_optimizer_state(optimizer.state_dict(), numbering(module, optimizer))
    ours = dict(module.named_parameters())
    for name, state in named["state"].items():
        assert torch.equal(state["exp_avg"], optimizer.state[ours[name]]["exp_avg"])

    names = [[n for n, p in ours.items() if any(p is q for q in g["params"])][::-1] for g in optimizer.param_groups]
    numbered = numbered_optimizer_state(named, names)
    for number, name in enumerate(name for group in names for name in group):
        assert torch.equal(numbered["state"][number]["exp_avg"], optimizer.state[ours[name]]["exp_avg"])
    assert [group["weight_decay"] for group in numbered["param_groups"]] == [0.01, 0.0]


def test_what_cannot_be_mapped_to_the_optimiser_is_refused():
    module, optimizer = trained()
    named = named_optimizer_state(optimizer.state_dict(), numbering(module, optimizer))
    names = [[*group["params"]] for group in named["param_groups"]]
    with pytest.raises(UserError, match=r"trained 21 parameters, this one trains 20 \(.* freeze the same parameters"):
        numbered_optimizer_state(named, [names[0], names[1][1:]])
    with pytest.raises(UserError, match="has the parameters of one group .* in several groups with different settings"):
        numbered_optimizer_state(named, [names[0] + names[1]])


def test_a_file_takes_the_place_of_another_only_when_it_is_whole(tmp_path, monkeypatch):
    io, path = MovableCheckpointIO(), tmp_path / "not" / "there" / "yet" / "last.ckpt"
    io.save_checkpoint({"step": 1}, path)

    def half(checkpoint: object, file: Path) -> None:
        Path(file).write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", half)
        with pytest.raises(KeyboardInterrupt):
            io.save_checkpoint({"step": 2}, path)
    assert torch.load(path) == {"step": 1}
    io.save_checkpoint({"step": 3}, path)
    assert torch.load(path) == {"step": 3}
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]


def test_a_folder_has_what_every_rank_wrote_however_late_and_nothing_of_a_killed_run(tmp_path):
    path, partial, barrier = tmp_path / "last.ckpt", tmp_path / "last.ckpt.partial", threading.Barrier(2, timeout=20)
    partial.mkdir()
    (partial / "of a killed run").touch()

    def write(is_first: bool) -> None:
        time.sleep(0.2 * is_first)
        with written_whole(path, is_first=is_first, wait=barrier.wait) as folder:
            folder.mkdir(exist_ok=True)
            (folder / f"{is_first}").touch()
            time.sleep(0.2 * (not is_first))
            (folder / f"{is_first}, late").touch()

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(write, (False, True)))
    assert sorted(file.name for file in path.iterdir()) == ["False", "False, late", "True", "True, late"]
    assert not partial.exists()


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


NESTED = {"state": {"a.weight": {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 1.0}]}
FLAT = {"state.a.weight.exp_avg": torch.ones(3), "param_groups.a.weight.lr": 1.0}


@pytest.mark.parametrize("state", [NESTED, FLAT])
def test_a_folder_tells_which_parameters_its_optimiser_trained(state, tmp_path):
    save({"state_dict": {"a.weight": torch.ones(3)}, "optimizer_0": state}, checkpoint_id=tmp_path / "x", no_dist=True)
    torch.save({"pytorch-lightning_version": "2.6.6"}, tmp_path / "x" / "meta.pt")
    folder = CheckpointFolder(tmp_path / "x")
    assert folder.trained("optimizer_0") == {"a.weight"}
    assert folder.trained("optimizer_1") == set()


def test_a_folder_that_a_killed_run_moved_aside_is_found_by_whoever_asks_for_it(tmp_path):
    checkpoint = {"state_dict": {"weight": torch.ones(3)}, "optimizer_states": [{"state": {}, "param_groups": []}]}
    checkpoint |= {"pytorch-lightning_version": "2.6.6", "loops": {}}  # type: ignore[dict-item]
    path, previous = tmp_path / "last.ckpt", tmp_path / "last.ckpt.previous"
    readers: list[Callable[[Path], Any]] = [
        check_whole,
        checkpoint_fault,
        read_weights,
        read_folder,
        MovableCheckpointIO().load_checkpoint,
        lambda folder: consolidate(folder, tmp_path / "file.ckpt"),
    ]
    for read in readers:
        shutil.rmtree(path, ignore_errors=True)
        save_flat(dict(checkpoint), previous)
        read(path)
        assert checkpoint_fault(path) is None
        assert not previous.exists()
    path.rename(previous)
    (previous / "meta.pt").unlink()  # a half is no checkpoint, and keeps its name
    assert checkpoint_fault(path) == f"there is no {path}"
    assert previous.exists()


def test_a_folder_that_a_reader_gave_its_name_back_is_replaced_all_the_same(tmp_path, monkeypatch):
    path, partial, previous = (tmp_path / f"last.ckpt{suffix}" for suffix in ("", ".partial", ".previous"))
    for folder in (path, partial):
        folder.mkdir()
        (folder / "content").write_text(folder.name)
    rename, meddled = Path.rename, []

    def meddle(own: Path, target: Path) -> Path:
        if own == partial and not meddled:
            meddled.append(rename(previous, path))
        return rename(own, target)

    monkeypatch.setattr(Path, "rename", meddle)
    put_in_place(partial, path)
    assert meddled
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]
    assert (path / "content").read_text() == "last.ckpt.partial"


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
