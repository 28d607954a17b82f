"""Tiny models with their tokenizers in a folder, and data that has a tokenizer."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning_helpers import loader
from tiny_models import VOCABULARY, tiny_batch, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def word_tokenizer(entries: int) -> PreTrainedTokenizerFast:
    """The words w3, w4, ... behind three special tokens, in a vocabulary of so many entries."""
    special = ["<pad>", "<bos>", "<eos>"]
    vocabulary = {word: index for index, word in enumerate([*special, *(f"w{i}" for i in range(3, entries))])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def pretrained(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    """A tiny model with its tokenizer, on the disk."""
    tiny_model(name, dtype).save_pretrained(folder)
    word_tokenizer(VOCABULARY).save_pretrained(folder)
    return folder


class Words(LightningDataModule):
    """A batch, and a tokenizer of some size."""

    def __init__(self, entries: int) -> None:
        super().__init__()
        self.tokenizer = word_tokenizer(entries)

    def train_dataloader(self) -> Any:
        return loader([tiny_batch(vocabulary=len(self.tokenizer))])
