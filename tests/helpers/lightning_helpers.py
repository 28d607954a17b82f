"""Small models, ragged batches and a quiet trainer, shared by the tests that run Lightning."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 61


def tiny_llama(seed: int = 0, **config: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "pad_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | config)))


def ragged_batches(count: int, batch: int = 2, length: int = 12, seed: int = 0) -> list[dict[str, Tensor]]:
    """Batches whose numbers of valid labels differ widely; the third has none at all."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for index in range(count):
        ids = torch.randint(VOCABULARY, (batch, length), generator=generator)
        labels = ids.clone()
        labels[:, : (0, 3, length, 8, 10)[index % 5]] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def loader(batches: list[dict[str, Tensor]]) -> DataLoader:
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def quiet_trainer(folder: Path, **options: Any) -> L.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
    }
    return L.Trainer(**(settings | options))
