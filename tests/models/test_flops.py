"""Model FLOPs by the convention against those that torch counts, peaks against data sheets, and MFU in a run."""

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.throughput import measure_flops
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from lit_fused import FusedCausalLMModule
from lit_fused.callbacks import TokenThroughput, throughput
from lit_fused.models.flops import model_flops, peak_flops

ROWS, LENGTH = 2, 128
SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 3,  # no experts
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}


def on_meta(config: PreTrainedConfig) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def counted(model: nn.Module) -> int:
    """Return what torch counts in forward and backward."""
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.long, device="meta")
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "use_cache": False}
    return measure_flops(model, lambda: model(**batch).logits, torch.Tensor.sum)


def flops(model: nn.Module) -> int:
    found = model_flops(model)
    assert found is not None
    return found.of(ROWS, LENGTH)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        LlamaConfig(**SIZES, tie_word_embeddings=True),
        Qwen3Config(**SIZES, head_dim=32),
        GPT2Config(vocab_size=1000, n_embd=64, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0),
        Gemma2Config(**SIZES, head_dim=32, sliding_window=LENGTH),
        DeepseekV3Config(**SIZES | LATENT),
    ],
    ids=["llama", "tied", "qwen3", "gpt2", "gemma2", "latent_attention"],
)
def test_a_dense_model_costs_what_torch_counts(config):
    model = on_meta(config)
    assert flops(model) == pytest.approx(counted(model), rel=1e-3)


def test_sliding_attention_has_no_more_keys_than_its_window():
    whole = on_meta(MistralConfig(**SIZES, sliding_window=LENGTH))
    half = on_meta(MistralConfig(**SIZES, sliding_window=LENGTH // 2))
    assert flops(whole) - flops(half) == ROWS * LENGTH * 12 * 3 * 4 * 16 * LENGTH // 2


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_token_meets_only_its_own_experts(family):
    if family == "mixtral":
        sparse = on_meta(MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2))
        dense = on_meta(LlamaConfig(**dict(SIZES, intermediate_size=2 * 160)))
    else:
        sizes: dict[str, Any] = {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 16,
        }
        sparse = on_meta(Qwen3MoeConfig(**SIZES, **sizes))
        dense = on_meta(Qwen3Config(**dict(SIZES, intermediate_size=2 * 32), head_dim=16))
    routers = 6 * 3 * 64 * 8
    assert flops(sparse) == flops(dense) + ROWS * LENGTH * routers


def test_frozen_weights_have_no_gradients_of_their_own():
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), attn_implementation="eager")
    whole = flops(base)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")).to("meta")
    assert flops(adapted) == pytest.approx(counted(adapted), rel=0.02)
    assert flops(adapted) < 0.8 * whole


def test_what_the_convention_does_not_fit_has_no_figure():
    t5 = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    assert model_flops(T5ForConditionalGeneration(t5)) is None
    assert model_flops(nn.Linear(2, 2)) is None


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H200", "bf16-mixed", 989.4),
        ("NVIDIA H200", "16-true", 989.4),
        ("NVIDIA H200", "32-true", 66.9),
        ("NVIDIA GH200 480GB", "bf16-true", 989.4),
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989.4),
        ("NVIDIA H100 NVL", "bf16-mixed", 835.5),
        ("NVIDIA H200 NVL", "bf16-mixed", 835.5),
        ("NVIDIA H100 PCIe", "bf16-mixed", 756),
        ("NVIDIA A100-SXM4-80GB", "bf16-mixed", 312),
        ("NVIDIA L40S", "bf16-mixed", 362),
        ("NVIDIA L4", "bf16-mixed", 121),
        ("NVIDIA GeForce RTX 4090", "bf16-mixed", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16-mixed", None),
        ("NVIDIA H20", "bf16-mixed", None),
        ("NVIDIA H200", "transformer-engine", None),
        ("NVIDIA H200", "64-true", None),
    ],
)
def test_the_peak_is_that_of_dense_products_in_the_runs_precision(name, precision, tflops):
    assert peak_flops(name, precision) == (None if tflops is None else tflops * 1e12)


def test_float32_is_tf32_where_torch_is_allowed_it():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert peak_flops("NVIDIA H200", "32-true") == 494.7e12
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("copies", "devices"), [(1, 1), (1, 2), (2, 4)], ids=["one", "tensor_parallel", "both"])
def test_mfu_counts_a_batch_once_and_the_peak_of_every_device(copies, devices, tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "peak_flops", lambda device, precision: 1e9)
    monkeypatch.setattr(throughput, "placement_of", lambda strategy: SimpleNamespace(data_parallel_size=copies))
    monkeypatch.setattr(L.Trainer, "world_size", devices)
    monitor = TokenThroughput(window_size=2)
    model = tiny_llama()
    per_token = model_flops(model)
    assert per_token is not None
    trainer = quiet_trainer(tmp_path, max_steps=4, accumulate_grad_batches=2, callbacks=[monitor])
    trainer.fit(FusedCausalLMModule(model), loader(ragged_batches(8)))
    assert monitor.tokens == 8 * 2 * 12 * copies
    expected = monitor.mean * per_token.of(1, 12) / 12 / (1e9 * devices)
    assert monitor.mean_mfu == pytest.approx(expected)
    rolling = trainer.callback_metrics["throughput/tokens_per_sec"] * per_token.of(1, 12) / 12 / (1e9 * devices)
    assert trainer.callback_metrics["throughput/mfu"] == pytest.approx(rolling.item(), rel=1e-4)
