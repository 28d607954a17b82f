"""Rows divided over ranks have the loss and the gradients of whole rows; what would not is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from errors_of import relative_error
from packing_cases import flash
from ranks import each
from tiny_models import MODELS, sharpen, tiny_batch, tiny_model
from torch import Tensor
from transformers import AttentionInterface

from lit_fused import LanguageModel, MaskedLanguageModel, reduce_memory
from lit_fused.context.divided_forward import DividedForward
from lit_fused.context.exchange import Ranks
from lit_fused.losses import CrossEntropyLoss, LinearCrossEntropyLoss

# A part of two ranks (10) is shorter than these positions scale to, and the row of 19 tokens is longer.
LIMIT = 14
THETA = {"rope_theta": 1e4}
DYNAMIC: dict[str, Any] = THETA | {"rope_type": "dynamic", "factor": 4.0}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 4.0, 6.0, 8.0]}
LONGROPE: dict[str, Any] = {"rope_type": "longrope", "original_max_position_embeddings": LIMIT} | FACTORS | THETA
_EXPERTS: dict[str, Any] = MODELS["mixtral"][1]

# name -> (the tiny model of tiny_models, changes to its configuration)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "llama, three key heads": ("llama", {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 3}),
    "llama, eager": ("llama", {"attn_implementation": "eager"}),
    "llama, flash": ("llama", {}),
    "llama, recompute": ("llama", {}),
    "llama, offload": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"sliding_window": 5}),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 5, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "mistral": ("mistral", {"sliding_window": 5}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "granite": ("granite", {}),
    "olmo2": ("olmo2", {}),
    "phi": ("phi", {}),
    "cohere": ("cohere", {}),
    "mixtral": ("mixtral", {}),
    "mixtral, offload": ("mixtral", {}),
    "mixtral, no router's loss": ("mixtral", {"output_router_logits": False}),
    "qwen3_moe": ("qwen3_moe", {}),
    "olmoe": ("olmoe", {**_EXPERTS, "num_experts": 4}),
    "phi3, longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": LIMIT}),
    "gemma3, longrope": (
        "gemma3_text",
        {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
        | {"rope_parameters": {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"} | THETA}},
    ),
    "llama, dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": LIMIT}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "head_dim": 8, "sliding_window": 5}),
    "deepseek_v3": (
        "deepseek_v3",
        {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
        | {"v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 24}
        | {"num_experts_per_tok": 2},
    ),
    "masked_modernbert": ("masked_modernbert", {}),
    "masked_eurobert": ("masked_eurobert", {}),
}


def built(name: str) -> Any:
    kind, changes = ARCHITECTURES[name]
    if kind not in MODELS and not kind.startswith("masked"):
        MODELS[kind] = kind, MODELS["llama"][1]
    model = sharpen(tiny_model(kind, **changes), 5.0)
    if name.endswith("flash"):
        AttentionInterface.register("flash_attention_2", flash)
        model.config._attn_implementation_internal = "flash_attention_2"  # The setter looks for its kernels.
    if name.endswith(("recompute", "offload")):
        reduce_memory(model, checkpointing=name.split(", ")[1], mlp_chunk_tokens=4)
    return (MaskedLanguageModel if kind.startswith("masked") else LanguageModel)(model, LinearCrossEntropyLoss())


def batch_of(kind: str, length: int = 19) -> dict[str, Tensor]:
    batch = tiny_batch(3, length)
    positions = torch.arange(length).expand(3, -1)
    if kind.startswith("packed"):
        starts = torch.tensor([[0], [7], [12]] if kind == "packed" else [[9], [7], [12]])
        batch["position_ids"] = torch.where(positions < starts, positions, positions - starts)
    elif kind == "padded":
        batch["attention_mask"] = (positions < torch.tensor([[length], [5], [12]])).long()
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    elif kind == "weighted":
        batch["token_weights"] = torch.linspace(0, 2, 3 * length).view(3, length)
    elif kind == "shifted":
        batch["shift_labels"] = batch.pop("labels").roll(1, 0)
    return batch


def ranks() -> Ranks:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    return Ranks(dist.group.WORLD)


def sums_and_gradients(model: LanguageModel, forward: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    output = model.compute(forward, batch)
    summed = output.loss_sum
    if output.aux_loss is not None:  # as a step adds it
        summed = summed + output.aux_loss * output.num_tokens
    summed.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": summed.detach(), "tokens": output.num_tokens.double()}


def error(case: tuple[str, str], length: int = 19) -> float:
    """Return how far the gradients of divided rows are from those of whole ones, relative to them."""
    group = ranks()
    model, batch = built(case[0]), batch_of(case[1], length)
    if case[1] == "standard":
        model.loss = CrossEntropyLoss()
    model.prepare(torch.device("cpu"))
    forward = DividedForward(model, group)
    truth = sums_and_gradients(model, model, batch)
    found = sums_and_gradients(model, forward, batch)
    for tensor in found.values():
        dist.all_reduce(tensor)
    for name in ("loss", "tokens"):
        torch.testing.assert_close(found[name], truth[name], rtol=1e-6, atol=0)
    return relative_error(found, truth)


KINDS = ("plain", "packed", "padded", "weighted", "shifted", "standard")
ROUNDING = 1e-6


def test_two_ranks_have_the_loss_and_gradients_of_whole_rows():
    others = [("mixtral", "padded"), ("phi3, longrope", "packed"), ("llama, dynamic", "packed apart")]
    found = each(error, 2, [("llama", kind) for kind in KINDS] + others)
    assert max(found.values()) < ROUNDING, found


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_all_architectures_have_the_loss_and_gradients_of_whole_rows(size):
    masked = {name for name in ARCHITECTURES if name.startswith("masked")}  # They do not keep documents apart.
    cases = [(name, kind) for name in ARCHITECTURES for kind in ("plain", "packed", "packed apart", "padded")]
    cases = [case for case in cases if case[0] not in masked or "packed" not in case[1]]
    found = each(error, size, cases)
    assert max(found.values()) < ROUNDING, found
