"""Half precision: rotary frequencies stay whole, and parameters that no optimiser can train are refused."""

import copy
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from tiny_models import tiny_model
from torch import Tensor, nn

from lit_fused import FusedCausalLMModule, UserError
from lit_fused.precision import RotaryHalfPrecision

POSITION = 8192
ROTARY = ["llama", "gemma2", "qwen3", "phi", "gpt_neox", "cohere", "falcon_h1", "olmo2", "mixtral"]


def frequencies(model: nn.Module) -> list[Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]


def cosine_error(found: Tensor, whole: Tensor) -> float:
    """Largest error of cos(position * frequency), with the product in float64."""
    return ((POSITION * found.double()).cos() - (POSITION * whole.double()).cos()).abs().max().item()


@pytest.mark.parametrize(("precision", "ruin"), [("bf16-true", 1.0), ("16-true", 0.5)])
def test_at_position_8192_cosines_are_exact_where_lightnings_own_plugin_ruins_them(precision, ruin):
    model = tiny_llama(hidden_size=128)
    whole = frequencies(model)[0].clone()
    assert len(whole) == 32
    rounded = HalfPrecision(precision).convert_module(copy.deepcopy(model))
    kept = RotaryHalfPrecision(precision).convert_module(model)
    assert cosine_error(frequencies(rounded)[0], whole) > ruin
    assert cosine_error(frequencies(kept)[0], whole) == 0


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
@pytest.mark.parametrize("name", ROTARY)
def test_models_of_many_kinds_run_with_whole_frequencies(name, precision):
    model = tiny_model(name)
    whole = [buffer.clone() for buffer in frequencies(model)]
    kept = RotaryHalfPrecision(precision).convert_module(model)
    half = torch.bfloat16 if precision == "bf16-true" else torch.float16
    assert {p.dtype for p in kept.parameters()} == {half}
    assert whole
    assert all(torch.equal(f, w) for f, w in zip(frequencies(kept), whole, strict=True))
    ids = torch.arange(3, 20)[None]
    assert kept(input_ids=ids, use_cache=False).logits.dtype == half


@pytest.mark.parametrize("stage", ["fit", "validate", "predict"])
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_a_trainer_with_bf16_true_keeps_them_by_itself(stage, strategy, tmp_path):
    backbone = tiny_llama()
    whole = frequencies(backbone)[0].clone()
    module = FusedCausalLMModule(backbone)
    trainer = quiet_trainer(tmp_path, max_steps=2, precision="bf16-true", strategy=strategy)
    getattr(trainer, stage)(module, loader(ragged_batches(2)))
    assert {p.dtype for p in backbone.parameters()} == {torch.bfloat16}
    assert cosine_error(frequencies(backbone)[0], whole) == 0
    assert trainer.precision == "bf16-true"


def test_a_second_fit_of_the_same_module_is_no_different(tmp_path):
    module = FusedCausalLMModule(tiny_llama())
    for _ in range(2):
        quiet_trainer(tmp_path, max_steps=1, precision="bf16-true").fit(module, loader(ragged_batches(1)))
    assert frequencies(module)[0].dtype == torch.float32


class Plain(L.LightningModule):
    """A module of somebody else around the same model."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.backbone(input_ids=batch["input_ids"]).logits


def test_without_the_plugin_lightning_rounds_them(tmp_path):
    backbone = tiny_llama()
    trainer = quiet_trainer(tmp_path, precision="bf16-true")
    trainer.predict(Plain(backbone), loader(ragged_batches(1)))
    assert frequencies(backbone)[0].dtype == torch.bfloat16


def test_a_model_that_was_made_in_bfloat16_has_whole_frequencies_and_keeps_them(tmp_path):
    backbone = type(tiny_llama())._from_config(tiny_llama().config, dtype=torch.bfloat16)
    whole = frequencies(tiny_llama())[0]
    for precision in ("32-true", "bf16-true", "bf16-mixed"):
        module = FusedCausalLMModule(backbone)
        quiet_trainer(tmp_path, max_steps=1, precision=precision).fit(module, loader(ragged_batches(1)))
        assert torch.equal(frequencies(backbone)[0], whole)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_a_model_whose_frequencies_were_rounded_before_is_refused(precision, tmp_path):
    module = FusedCausalLMModule(tiny_llama().to(torch.bfloat16))
    with pytest.raises(UserError, match=r"LlamaRotaryEmbedding.inv_freq\) were rounded to torch.bfloat16.*dtype="):
        quiet_trainer(tmp_path, max_steps=1, precision=precision).fit(module, loader(ragged_batches(1)))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_float16_parameters_are_refused_unless_asked_for(precision, tmp_path):
    backbone = tiny_model("gpt2", torch.float16)  # no rotary embeddings
    module, trainer = FusedCausalLMModule(backbone), quiet_trainer(tmp_path, max_steps=1, precision=precision)
    with pytest.raises(UserError, match=r"wte.weight is float16 \(model.half\(\)\?\).*precision=16-mixed"):
        trainer.fit(module, loader(ragged_batches(1)))


def test_frozen_float16_parameters_are_no_harm(tmp_path):
    backbone = tiny_model("gpt2", torch.float16).requires_grad_(False)
    quiet_trainer(tmp_path).validate(FusedCausalLMModule(backbone), loader(ragged_batches(1)))
