"""Models and batches for packing: one that takes finished masks, one whose documents see each other, and a row."""

from collections.abc import Callable
from typing import Any

import torch
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
