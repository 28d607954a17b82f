"""A plan counts for compiled layers what such layers save for backward."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

import lit_fused
from lit_fused import FusedCausalLMModule, PlanOptions, reduce_memory
from lit_fused.planning import compiled_layers
from lit_fused.planning.compiled_layers import kept_when_compiled

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
LLAMA: Any = LlamaConfig
ALL: dict[str, Any] = SIZES | {"vocab_size": 512, "num_hidden_layers": 4}
OPTIONS = PlanOptions(compute_capability=9.0, precision="bf16-true")


def activations(compile: str, checkpointing: str = "none") -> float:
    model = reduce_memory(AutoModelForCausalLM.from_config(LLAMA(**ALL)), checkpointing=checkpointing)
    found = lit_fused.plan(OPTIONS, FusedCausalLMModule(model, compile=compile), batch_size=2, sequence_length=1024)
    return found.phases["forward"]["activations"]


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_a_compiled_layer_is_counted_with_what_autograd_saves_of_one_that_runs(kind):
    model = AutoModelForCausalLM.from_config(kind(**ALL), dtype=torch.bfloat16)
    layer, saved = model.model.layers[0], {}
    hidden = torch.randn(2, 32, 64, dtype=torch.bfloat16, requires_grad=True)
    cos_sin = model.model.rotary_emb(hidden, torch.arange(32)[None])
    known = [t.untyped_storage() for t in (hidden, *cos_sin, *layer.parameters())]

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if all(storage is not other for other in known):
            saved[id(storage)] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        compiled = torch.compile(layer, backend="aot_eager_decomp_partition", dynamic=False)
        out = compiled(hidden, position_embeddings=cos_sin, attention_mask=None)
    real = sorted(storage.nbytes() for storage in saved.values())
    counted = kept_when_compiled(
        type(layer).forward, layer, None, hidden, [], {"position_embeddings": cos_sin, "attention_mask": None}
    )
    assert out.requires_grad
    assert counted is not None
    assert sorted(counted) == real


def test_twelve_lengths_are_counted_alike():
    model = AutoModelForCausalLM.from_config(LLAMA(**ALL), dtype=torch.bfloat16)
    layer, counted = model.model.layers[0], []
    for tokens in range(16, 16 * 13, 16):
        hidden = torch.randn(1, tokens, 64, dtype=torch.bfloat16, requires_grad=True)
        cos_sin = model.model.rotary_emb(hidden, torch.arange(tokens)[None])
        kwargs = {"position_embeddings": cos_sin, "attention_mask": None}
        kept = kept_when_compiled(type(layer).forward, layer, None, hidden, [], kwargs)
        assert kept is not None
        counted.append(sum(kept) / tokens)
    assert counted == counted[:1] * 12


def test_a_plan_keeps_of_each_compiled_layer_what_was_counted():
    kept, eager = activations("regional"), activations("none")
    assert kept == activations("auto")
    assert 0.5 * eager < kept < 0.8 * eager


def test_layers_that_cannot_be_compiled_are_planned_with_their_checkpoints(monkeypatch):
    monkeypatch.setattr(compiled_layers, "kept_when_compiled", lambda *_: None)
    for checkpointing in ("none", "recompute", "offload"):
        assert activations("regional", checkpointing) == activations("none", checkpointing)


@pytest.mark.parametrize("checkpointing", ["recompute", "offload"])
def test_layers_that_are_computed_again_keep_as_little_when_they_are_compiled(checkpointing):
    assert activations("regional", checkpointing) <= activations("none", checkpointing) < 0.5 * activations("regional")
