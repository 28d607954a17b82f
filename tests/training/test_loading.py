"""``Class.load_from_checkpoint`` as in Lightning, and ``lit_fused.load``."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_helpers import loader, quiet_trainer, ragged_batches
from safetensors.torch import save_file
from tiny_models import tiny_model
from torch import Tensor, nn

from lit_fused import CrossEntropyLoss, FusedCausalLMModule, from_config


class Mine(FusedCausalLMModule):
    """A user's, which saves what it was built with."""

    def __init__(self, backbone: nn.Module, rate: float = 0.1, layers: tuple[int, ...] = (1,), **options: Any) -> None:
        super().__init__(backbone, **options)
        self.save_hyperparameters()
        self.rate, self.extra = rate, nn.Linear(2, 2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Mine]:
    folder = tmp_path_factory.mktemp("loading")
    module, trainer = Mine(tiny_model("llama"), rate=0.25, loss=CrossEntropyLoss()), quiet_trainer(folder, max_steps=1)
    trainer.fit(module, loader(ragged_batches(1)))
    trainer.save_checkpoint(folder / "one.ckpt")
    saved = torch.load(folder / "one.ckpt")
    rest = {key: value for key, value in saved.items() if key not in ("state_dict", "optimizer_states")}
    weights = {f"state_dict.{name}": weight.clone() for name, weight in saved["state_dict"].items()}
    (folder / "folder.ckpt").mkdir()
    save_file(weights, folder / "folder.ckpt" / "shard-00001-model-00001-of-00001.safetensors")
    torch.save(rest, folder / "folder.ckpt" / "meta.pt")
    return folder, module


def equal(ours: nn.Module, theirs: nn.Module) -> bool:
    state: dict[str, Tensor] = theirs.state_dict()
    return all(torch.equal(value, state[name]) for name, value in ours.state_dict().items())


@pytest.mark.parametrize("name", ["one.ckpt", "folder.ckpt"])
def test_a_checkpoint_is_loaded_by_its_class_with_what_is_no_plain_value_given_again(name, trained):
    folder, module = trained
    loaded = Mine.load_from_checkpoint(folder / name, backbone=tiny_model("llama"), map_location="cpu")
    assert loaded.rate == 0.25
    assert equal(loaded, module)
    loaded = Mine.load_from_checkpoint(
        str(folder / name), backbone=tiny_model("llama"), rate=3, loss=CrossEntropyLoss()
    )
    assert loaded.rate == 3
    assert isinstance(loaded.model.loss, CrossEntropyLoss)
    batch = ragged_batches(1)[0]
    assert torch.equal(loaded.eval().compute_loss(batch).loss_sum, module.eval().compute_loss(batch).loss_sum)

    late = from_config(copy.deepcopy(tiny_model("llama").config))
    assert equal(Mine.load_from_checkpoint(folder / name, backbone=late), module)
    plain = FusedCausalLMModule.load_from_checkpoint(folder / name, backbone=tiny_model("llama"), strict=False)
    assert equal(plain, module)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*extra"):
        FusedCausalLMModule.load_from_checkpoint(folder / name, backbone=tiny_model("llama"))


def test_weights_of_another_precision_are_loaded(trained, tmp_path):
    saved = torch.load(trained[0] / "one.ckpt")
    name = "model.backbone.lm_head.weight"
    state = saved["state_dict"] | {name: saved["state_dict"][name].bfloat16()}
    torch.save(saved | {"state_dict": state}, tmp_path / "torch.bfloat16.ckpt")
    loaded = Mine.load_from_checkpoint(tmp_path / "torch.bfloat16.ckpt", backbone=tiny_model("llama"))
    assert torch.equal(loaded.backbone.get_parameter("lm_head.weight"), state[name].float())
