"""Half precision: rotary frequencies stay whole, and parameters that no optimiser can train are refused."""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from tiny_models import tiny_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fused import FusedCausalLMModule, UserError
from lit_fused.models.precision import RotaryHalfPrecision

POSITION = 8192
ROTARY = ["llama", "gemma2", "qwen3", "phi", "gpt_neox", "cohere", "falcon_h1", "olmo2", "mixtral", "mistral"]
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
MORE_ROTARY: dict[str, dict[str, Any]] = {  # transformers' model types with rotary embeddings of other kinds
    "falcon": {},
    "gemma3_text": {"head_dim": 8, "num_hidden_layers": 6},  # frequencies for each type of layer
    "deepseek_v3": {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1} | LATENT,
}


def rotary_model(name: str) -> nn.Module:
    if name in ROTARY:
        return tiny_model(name)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "pad_token_id": 0} | MORE_ROTARY[name]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes))


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
@pytest.mark.parametrize("name", [*ROTARY, *MORE_ROTARY])
def test_models_of_many_kinds_run_with_whole_frequencies(name, precision):
    model = rotary_model(name)
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


def test_a_model_that_was_made_in_bfloat16_has_whole_frequencies_and_keeps_them(tmp_path):
    backbone = type(tiny_llama())._from_config(tiny_llama().config, dtype=torch.bfloat16)
    whole = frequencies(tiny_llama())[0]
    for precision in ("32-true", "bf16-true", "bf16-mixed"):
        module = FusedCausalLMModule(backbone)
        quiet_trainer(tmp_path, max_steps=1, precision=precision).fit(module, loader(ragged_batches(1)))
        assert torch.equal(frequencies(backbone)[0], whole)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_a_model_whose_frequencies_were_rounded_before_is_refused(precision, tmp_path):
    module = FusedCausalLMModule(nn.Module.to(tiny_llama(), torch.bfloat16))
    with pytest.raises(UserError, match=r"LlamaRotaryEmbedding.inv_freq\) were rounded to torch.bfloat16.*dtype="):
        quiet_trainer(tmp_path, max_steps=1, precision=precision).fit(module, loader(ragged_batches(1)))


class ComplexRotary(nn.Module):
    """Rotations as complex numbers, as in Llama's first code."""

    freqs_cis: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("freqs_cis", torch.polar(torch.ones(64), torch.arange(64.0)), persistent=False)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_complex_rotations_keep_their_imaginary_part():
    rotary = ComplexRotary()
    whole = rotary.freqs_cis.clone()
    assert not HalfPrecision("bf16-true").convert_module(copy.deepcopy(rotary)).get_buffer("freqs_cis").is_complex()
    assert torch.equal(RotaryHalfPrecision("bf16-true").convert_module(rotary).get_buffer("freqs_cis"), whole)


def test_a_checkpoint_of_bf16_true_holds_no_frequencies_and_resumes_with_whole_ones(tmp_path):
    batches = loader(ragged_batches(2))
    first = quiet_trainer(tmp_path, max_steps=1, precision="bf16-true")
    first.fit(FusedCausalLMModule(tiny_llama()), batches)
    first.save_checkpoint(tmp_path / "last.ckpt")
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert not any("inv_freq" in name for name in checkpoint["state_dict"])
    assert {value.dtype for value in checkpoint["state_dict"].values()} == {torch.bfloat16}
    module = FusedCausalLMModule(tiny_llama())
    second = quiet_trainer(tmp_path, max_steps=2, precision="bf16-true")
    second.fit(module, batches, ckpt_path=tmp_path / "last.ckpt")
    assert second.global_step == 2
    assert torch.equal(frequencies(module)[0], frequencies(tiny_llama())[0])


HALF = r"wte.weight is float16 \(model.half\(\), or .*checkpoint\).*dtype=torch.float32 and choose precision=16-mixed"


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_float16_parameters_are_refused_where_they_would_stay_so(precision, tmp_path):
    backbone = tiny_model("gpt2", torch.float16)  # no rotary embeddings
    module, trainer = FusedCausalLMModule(backbone), quiet_trainer(tmp_path, max_steps=1, precision=precision)
    with pytest.raises(UserError, match=HALF):
        trainer.fit(module, loader(ragged_batches(1)))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_bfloat16_parameters_that_stay_so_train_with_one_warning(precision, tmp_path):
    module = FusedCausalLMModule(tiny_model("gpt2", torch.bfloat16))
    trainer = quiet_trainer(tmp_path, max_steps=2, precision=precision)
    with pytest.warns(UserWarning, match=r"is bfloat16 and stays so with precision=.*dtype=torch.float32") as caught:
        trainer.fit(module, loader(ragged_batches(2)))
    assert sum("stays so" in str(warning.message) for warning in caught) == 1
