"""A data module of a few batches with a tokenizer of words, and a tiny T5 for them."""

from typing import Any

import lightning as L
from lightning_helpers import VOCABULARY, loader, ragged_batches
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration


class Words(L.LightningDataModule):
    """Batches, and a tokenizer whose entries are w0, w1, ..."""

    def __init__(self) -> None:
        super().__init__()
        words = {f"w{i}": i for i in range(VOCABULARY)}
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), eos_token="w0", pad_token="w1"
        )

    def train_dataloader(self) -> Any:
        return loader(ragged_batches(4))


def tiny_t5(vocab_size: int = VOCABULARY) -> T5ForConditionalGeneration:
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    special: dict[str, Any] = {"pad_token_id": 1, "eos_token_id": 0, "decoder_start_token_id": 1}
    return T5ForConditionalGeneration(T5Config(vocab_size=vocab_size, **sizes, **special))
