"""Layers in float8, and where they are refused. What computes in float8 needs torchao and a GPU that has it."""

import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning_helpers import loader, quiet_trainer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lit_fused import FusedCausalLMModule, LanguageModel, LinearCrossEntropyLoss, PreferenceLoss, UserError
from lit_fused.models import float8_layers


def wide_llama(hidden_size: int = 2048) -> LlamaForCausalLM:
    torch.manual_seed(0)
    heads: Any = {"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=512, hidden_size=hidden_size, intermediate_size=hidden_size, **heads)
    return LlamaForCausalLM(config)


def batches(count: int, tokens: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(512, (1, tokens), generator=generator) for _ in range(count)]
    return [{"input_ids": x, "labels": x} for x in ids]


def test_a_cpu_is_refused_before_anything_is_changed(tmp_path):
    module = FusedCausalLMModule(wide_llama(64), kernels="float8")
    with pytest.raises(
        UserError, match=r"kernels=float8 is for a CUDA GPU .*8\.9 or more, and this is cpu; choose ker"
    ):
        quiet_trainer(tmp_path, max_steps=1).fit(module, loader(batches(1, 8)))
    assert all(type(part) is not nn.Linear or type(part.weight) is nn.Parameter for part in module.modules())


Settings = dict[str, Any]
FINE: Settings = {"width": 2048, "precision": "bf16-mixed", "devices": 1, "compile": "regional"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"width": 1024}, "widest layers have 1024 inputs or outputs, and below 2048 float8 is slower"),
        ({"precision": "32-true"}, "precision is 32-true; choose precision=bf16-mixed or bf16-true"),
        ({"devices": 2}, "never tested on several devices; choose kernels=none, or trainer.devices=1"),
        ({"compile": "none"}, "slower than in bfloat16 unless they are compiled; choose compile=regional"),
        ({"loss": PreferenceLoss()}, "PreferenceLoss was never tested with float8, .* choose kernels=none"),
        ({}, None),
    ],
)
def test_what_would_be_slower_or_was_never_compared_is_refused(monkeypatch, changed: Settings, message: str | None):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "torchao.float8", SimpleNamespace())
    settings = FINE | changed
    strategy: Any = SimpleNamespace(
        root_device=torch.device("cuda:0"),
        precision_plugin=SimpleNamespace(precision=settings["precision"]),
        world_size=settings["devices"],
    )
    with torch.device("meta"):
        model = LanguageModel(wide_llama(settings["width"]), settings.get("loss", LinearCrossEntropyLoss()))
    with nullcontext() if message is None else pytest.raises(UserError, match=message):
        float8_layers.check_float8(model, settings["compile"], strategy)


def test_small_layers_and_the_output_layer_stay_as_they_are():
    with torch.device("meta"):
        backbone = wide_llama()
        backbone.model.layers[0].add_module("router", nn.Linear(2048, 64))
    found = float8_layers._layers(LanguageModel(backbone, LinearCrossEntropyLoss()))
    assert len(found) == 2 * 7
    assert all(layer is not backbone.lm_head for _, _, layer in found)


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao (pip install '.[float8]')")
def test_training_is_in_float8_and_everything_else_as_without(tmp_path: Path):
    def fitted(kernels: str) -> FusedCausalLMModule:
        module = FusedCausalLMModule(wide_llama(), compile="regional", kernels=kernels)
        trainer = quiet_trainer(tmp_path, accelerator="gpu", precision="bf16-mixed", max_steps=20)
        trainer.fit(module, loader(batches(20, 131)))  # a number of tokens that no tile has
        return module

    plain, module = fitted("none"), fitted("float8")
    assert list(module.state_dict()) == list(plain.state_dict())
    kinds = {type(part).__name__ for part in module.backbone.model.layers.modules()}  # type: ignore[union-attr]
    assert "TrainedInFloat8" in kinds
    weights = module.state_dict()
    assert any(not torch.equal(weights[name].cpu(), value.cpu()) for name, value in plain.state_dict().items())
    plain.load_state_dict(weights)
    ids = batches(1, 131)[0]["input_ids"].cuda()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        logits = [m.cuda().eval()(input_ids=ids).logits for m in (module, plain)]
    assert torch.equal(*logits)
