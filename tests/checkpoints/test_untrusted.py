"""A checkpoint of a stranger, file or folder, runs no code, whoever reads it."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from safetensors.torch import save_file

from lit_fused import FusedCausalLMModule
from lit_fused.parallel.checkpoint import read_checkpoint, read_rest, read_weights


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def resumed(path: Path) -> None:
    trainer = quiet_trainer(path.parent, max_steps=2)
    trainer.fit(FusedCausalLMModule(tiny_llama()), loader(ragged_batches(4)), ckpt_path=path)


def loaded(path: Path) -> None:
    FusedCausalLMModule.load_from_checkpoint(path, backbone=tiny_llama())


READERS = {
    "read_weights": read_weights,
    "read_rest": read_rest,
    "read_checkpoint": read_checkpoint,
    "load_from_checkpoint": loaded,
    "resume": resumed,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    trainer = quiet_trainer(folder, max_steps=1)
    trainer.fit(FusedCausalLMModule(tiny_llama()), loader(ragged_batches(4)))
    trainer.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt"


@pytest.mark.parametrize("reader", [name for name in READERS if name != "read_checkpoint"])
def test_a_file_runs_no_code(reader, saved, tmp_path):
    content = torch.load(saved) | {"payload": Payload(tmp_path / "ran")}
    torch.save(content, tmp_path / "bad.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        READERS[reader](tmp_path / "bad.ckpt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("reader", READERS)
def test_a_folder_runs_no_code(reader, saved, tmp_path):
    content = torch.load(saved)
    weights = {f"state_dict.{name}": value.clone() for name, value in content.pop("state_dict").items()}
    folder = tmp_path / "bad.ckpt"
    folder.mkdir()
    save_file(weights, folder / "shard-00001-model-00001-of-00001.safetensors")
    for name in (".metadata", "__0_0.distcp"):  # what torch's own folders have is not read
        (folder / name).write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    torch.save(content | {"payload": Payload(tmp_path / "ran")}, folder / "meta.pt")
    with pytest.raises(pickle.UnpicklingError):
        READERS[reader](folder)
    assert not (tmp_path / "ran").exists()


def test_hyperparameters_that_could_run_code_are_not_saved(tmp_path):
    class Own(FusedCausalLMModule):
        def __init__(self, backbone: Any, width: int = 3) -> None:
            super().__init__(backbone)
            self.save_hyperparameters()

    trainer = quiet_trainer(tmp_path, max_steps=1)
    trainer.fit(Own(tiny_llama()), loader(ragged_batches(4)))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert torch.load(tmp_path / "last.ckpt")["hyper_parameters"] == {"width": 3}
