"""Checkpoints that move between strategies and numbers of ranks, and that appear whole or not at all."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_job import train, weights_of
from lightning_helpers import loader, quiet_trainer
from parallel_cases import backbone, batches
from test_distributed import RENDEZVOUS
from test_parallel import relative_error
from torch.optim import AdamW

from lit_fused import FusedCausalLMModule, UserError
from lit_fused.checkpoints import (
    MovableCheckpointIO,
    check_numbers,
    named_optimizer_state,
    numbered_optimizer_state,
    numbering,
    read_folder,
)

JOB = Path(__file__).with_name("checkpoint_job.py")


def launch(ranks: int, folder: Path, *items: str, timeout: float = 150) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(JOB), str(folder), *items],
        env={name: value for name, value in os.environ.items() if name not in RENDEZVOUS} | {"OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-6000:]


WRITTEN = ["ddp-2", "fsdp-2", "fsdp2-2", "fsdp2_file-2", "fsdp2-4"]
RESUMED_BY_FOUR = ["fsdp2-2>fsdp2", "fsdp2-2>ddp", "ddp-2>fsdp2"]
RESUMED_BY_TWO = [
    "fsdp2-4>fsdp2",
    "fsdp2-2>ddp",
    "fsdp-2>ddp",
    "fsdp2-2>fsdp",
    "fsdp-2>fsdp2",
    "ddp-2>fsdp",
    "ddp-2>fsdp2_file",
    "fsdp2_file-2>fsdp2",
    "fsdp2_file-2>fsdp",
    "ddp-2>lightnings_fsdp2",
    "fsdp2-4>lightnings_fsdp2",
    "ddp-2>lightnings_fsdp",
]
ANOTHER_MODEL = ["ddp-2>fsdp2+qwen3", "fsdp2-2>fsdp2+qwen3"]


@pytest.mark.timeout(400)
def test_a_run_goes_on_exactly_under_another_strategy_and_another_number_of_ranks(tmp_path):
    """Weights after three epochs, two before the checkpoint and one after, against three at once in float64."""
    launch(2, tmp_path, "ddp", "fsdp", "fsdp2", "fsdp2_file")
    launch(4, tmp_path, "fsdp2", *RESUMED_BY_FOUR)  # one of the ranks has no valid label in its first batch
    launch(2, tmp_path, *RESUMED_BY_TWO, *ANOTHER_MODEL)
    truth = weights_of(*train("auto", tmp_path, epochs=3, precision="64-true"))
    errors = {}
    for ranks, items in ((4, RESUMED_BY_FOUR), (2, RESUMED_BY_TWO)):
        for item in items:
            errors[item] = relative_error(torch.load(tmp_path / f"{item}-{ranks}.pt"), truth)
    for source in WRITTEN:
        resumed = train("auto", tmp_path, epochs=3, ckpt_path=tmp_path / f"{source}.ckpt")
        errors[f"{source}>auto"] = relative_error(weights_of(*resumed), truth)
    assert max(errors.values()) < 1e-6, errors
    for item in ANOTHER_MODEL:
        message = "the checkpoint is of another model: .* parameters differ .*use the model configuration that it was"
        assert re.search(message, torch.load(tmp_path / f"{item}-2.pt")), item
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".partial", ".previous")]

    folder = tmp_path / "fsdp2-4.ckpt"
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
    with pytest.raises(UserError, match="in another order than a sharded strategy does.*resume it once with"):
        check_numbers([optimizer.state_dict()], [optimizer], module)
    check_numbers([named], [optimizer], module)


def test_a_file_takes_the_place_of_another_only_when_it_is_whole(tmp_path, monkeypatch):
    io, path = MovableCheckpointIO(), tmp_path / "last.ckpt"
    io.save_checkpoint({"step": 1}, path)

    def half(checkpoint: object, file: Path) -> None:
        Path(file).write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", half)
        with pytest.raises(KeyboardInterrupt):
            io.save_checkpoint({"step": 2}, path)
    assert io.load_checkpoint(path) == {"step": 1}
    io.save_checkpoint({"step": 3}, path)
    assert io.load_checkpoint(path) == {"step": 3}
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_checkpoint_of_an_earlier_version_with_numbers_resumes_on_a_single_device(tmp_path):
    modules = [FusedCausalLMModule(backbone("llama")) for _ in range(2)]
    trainer = quiet_trainer(tmp_path, max_epochs=1)
    trainer.fit(modules[0], loader(batches()[:2]))
    path = tmp_path / "old.ckpt"
    trainer.save_checkpoint(path)
    checkpoint = torch.load(path)
    assert all(isinstance(name, str) for name in checkpoint["optimizer_states"][0]["state"])
    checkpoint["optimizer_states"] = [trainer.optimizers[0].state_dict()]
    torch.save(checkpoint, path)
    resumed = quiet_trainer(tmp_path, max_epochs=2)
    resumed.fit(modules[1], loader(batches()[:2]), ckpt_path=path)
    steps = [state["step"].item() for state in resumed.optimizers[0].state.values()]
    assert steps == [4] * len(steps)
