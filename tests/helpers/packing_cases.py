"""Models and batches for packing: one that takes finished masks, one whose documents see each other, and a row; and
FlashAttention's call."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from tiny_models import VOCABULARY
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GptOssConfig, MambaConfig, MambaForCausalLM


def gpt_oss() -> nn.Module:
    """Sliding and full attention by turns, with a sink; it does not look at positions for its masks."""
    config = GptOssConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4
    )
    config.update({"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "sliding_window": 8})
    config._experts_implementation = "eager"
    return seeded(lambda: AutoModelForCausalLM.from_config(config))


def mamba() -> nn.Module:
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8)
    return seeded(lambda: MambaForCausalLM(config))


def seeded(build: Callable[[], Any]) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().train()


def row(*lengths: int) -> dict[str, Tensor]:
    ids = torch.arange(sum(lengths))[None] % 50 + 5
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}


def flash(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
    """Attend as FlashAttention does, whose kernels need a GPU: to documents whose ends it is told, or by a mask."""
    assert options.get("position_ids") is None or options["position_ids"].shape[1] == query.shape[2]
    ends = options.get("cu_seq_lens_q", torch.arange(len(query) + 1) * query.shape[2])
    assert (ends.diff() <= options.get("max_length_q", 10**6)).all()
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    if mask is not None:
        seen = mask[:, None, None].bool() & torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen).transpose(1, 2), None
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    attend: Any = F.scaled_dot_product_attention
    parts = [
        attend(*(x[start:stop].transpose(0, 1) for x in flat), is_causal=True, scale=options.get("scaling"))
        for start, stop in pairwise(ends.tolist())
    ]
    return torch.cat(parts, 1).transpose(0, 1).unflatten(0, (len(query), -1)), None
