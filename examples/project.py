"""Share what the examples share, an ordinary Lightning project's other half: documents, a small Llama and a trainer.

python examples/before.py
python examples/after_loss_only.py
python examples/after_subclass.py
python examples/plain_module.py
python examples/plain_transformer.py
"""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from lit_fused import PeakMemoryMonitor

VOCAB_SIZE = 32_000
MAX_LENGTH = 256  # tokens of a document
BATCH_SIZE = 4


class Documents(Dataset[Tensor]):
    """Random documents of 128 to 256 tokens, the frequent tokens as frequent as Zipf's law has them."""

    def __init__(self, vocab_size: int, first: int, count: int) -> None:
        self.vocab_size = vocab_size
        self.first = first
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.first + index)
        length = int(torch.randint(MAX_LENGTH // 2, MAX_LENGTH + 1, (), generator=generator))
        return (self.vocab_size ** torch.rand(length, generator=generator)).long()


def collate(documents: list[Tensor]) -> dict[str, Tensor]:
    """Pad on the right. Labels are aligned with the inputs, -100 on the padding."""
    return {
        "input_ids": pad_sequence(documents, batch_first=True, padding_value=0),
        "attention_mask": pad_sequence([torch.ones_like(d) for d in documents], batch_first=True, padding_value=0),
        "labels": pad_sequence(documents, batch_first=True, padding_value=-100),
    }


def build_model(vocab_size: int = VOCAB_SIZE) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_LENGTH,
    )
    return LlamaForCausalLM(config)


def build_loaders(
    vocab_size: int = VOCAB_SIZE, collate: Callable[[list[Tensor]], dict[str, Tensor]] = collate
) -> tuple[DataLoader[Tensor], DataLoader[Tensor]]:
    train, val = Documents(vocab_size, first=0, count=1000), Documents(vocab_size, first=1000, count=8)
    return DataLoader(train, BATCH_SIZE, collate_fn=collate), DataLoader(val, BATCH_SIZE, collate_fn=collate)


def fit(
    module: L.LightningModule,
    vocab_size: int = VOCAB_SIZE,
    collate: Callable[[list[Tensor]], dict[str, Tensor]] = collate,
    **options: Any,
) -> L.Trainer:
    """Train for ten steps, validate, print the peak memory and the last losses, and write no files."""
    defaults: dict[str, Any] = {
        "max_epochs": 1,
        "limit_train_batches": 10,
        "devices": 1,
        "gradient_clip_val": 1.0,
        "callbacks": [PeakMemoryMonitor()],
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(**defaults | options)
    trainer.fit(module, *build_loaders(vocab_size, collate))
    print(" ".join(f"{name} {trainer.callback_metrics[name]:.4f}" for name in ("train/loss", "val/loss")))
    return trainer
