"""Encode plain text: a document is its tokens, and the tokenizer's end-of-text token.

A document begins with the beginning-of-text token where the tokenizer itself puts one in front of a text (Llama 3,
Gemma), so that training sees what generation will.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from lit_fused.data.encoding import Packing, encoder_fingerprint, end_of_text
from lit_fused.data.store import Encoded
from lit_fused.data.tokenizer import MIN_VOCAB_SIZE, train_tokenizer
from lit_fused.errors import UserError

_SLICE = 2**20  # characters that are encoded at once: meanwhile a token costs the tokenizer some hundred bytes


@dataclass(frozen=True)
class TextEncoding:
    """Documents are text, on all of which loss is wanted.

    Attributes:
        text_column: The field of a JSON line, or the column of a table, that holds the text.
    """

    kind: ClassVar[str] = "text"
    packings: ClassVar[tuple[Packing, ...]] = ("stream", "documents", "none")
    min_vocab_size: ClassVar[int] = MIN_VOCAB_SIZE
    columns = ()

    text_column: str = "text"

    def __post_init__(self) -> None:
        if not isinstance(self.text_column, str):
            raise UserError(f"data.text_column must be the name of a field or column; got {self.text_column!r}")

    def fingerprint(self, block_size: int, *, trained: bool = False) -> dict[str, Any]:
        return {"encoder": "text"}

    def train(self, documents: list[str], vocab_size: int) -> PreTrainedTokenizerBase:
        return train_tokenizer(documents, vocab_size)

    def encoder(self, tokenizer: PreTrainedTokenizerBase, block_size: int) -> "TextEncoder":
        return TextEncoder(tokenizer, self)


class TextEncoder:
    """Encode whole texts, each framed by the tokenizer's own special tokens.

    Special tokens that a document spells out are encoded as ordinary text. A document of more than a million
    characters is encoded in slices that end with a line.

    Raises:
        UserError: The tokenizer has no end-of-text token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, encoding: TextEncoding | None = None) -> None:
        self.tokenizer = tokenizer
        self.encoding = encoding or TextEncoding()
        framed = tokenizer("a")["input_ids"]
        bos = tokenizer.bos_token_id
        self.prefix = [bos] if isinstance(bos, int) and framed[:1] == [bos] and len(framed) > 1 else []
        self.suffix = [end_of_text(tokenizer, "which every document ends with")]

    def fingerprint(self) -> dict[str, Any]:
        return encoder_fingerprint(self.encoding, self.tokenizer, 0)

    def __call__(self, documents: list[str]) -> list[Encoded]:
        slices = [list(_slices(document)) for document in documents]
        flat = [part for parts in slices for part in parts]
        encoded = self.tokenizer(
            flat, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
        )
        remaining = iter(encoded["input_ids"])
        results = []
        for parts in slices:
            tokens = [self.prefix, *(next(remaining) for _ in parts), self.suffix]
            results.append(Encoded(np.concatenate([np.asarray(part, np.int64) for part in tokens])))
        return results


def _slices(document: str) -> Sequence[str]:
    """Return slices of at most ``_SLICE`` characters, each ending with a line where it can."""
    slices, start = [], 0
    while len(document) - start > _SLICE:
        end = document.rfind("\n", start, start + _SLICE) + 1 or start + _SLICE
        slices.append(document[start:end])
        start = end
    return [*slices, document[start:]] if start < len(document) else slices
