"""Encode pairs of a source and a target for encoder-decoders.

In the store a pair is one document: the tokens of the source, on which no loss is wanted, then those of the target, on
which it is. The first wanted token is thus the border, and :class:`lit_fused.data.packing.PairRows` divides them again.
"""

from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from lit_fused.data.encoding import Packing, encoder_fingerprint, end_of_text, text_field, tokenize
from lit_fused.data.source import DocumentError
from lit_fused.data.store import Encoded
from lit_fused.data.tokenizer import MIN_VOCAB_SIZE, train_tokenizer
from lit_fused.data.truncation import TooLong, check_too_long, is_left_out, leave_out


@dataclass(frozen=True)
class PairEncoding:
    """Documents are pairs of texts: the encoder reads the source, and the decoder learns to say the target.

    Attributes:
        source_column: The source's column.
        target_column: The target's column.
        too_long: A pair whose source or target has more than ``block_size`` tokens is cut ("cut"; end tokens stay),
            left out ("skip") or refused ("refuse").
    """

    kind: ClassVar[str] = "pairs"
    packings: ClassVar[tuple[Packing, ...]] = ("pairs",)
    min_vocab_size: ClassVar[int] = MIN_VOCAB_SIZE
    text_column = None

    source_column: str = "source"
    target_column: str = "target"
    too_long: TooLong = "cut"

    def __post_init__(self) -> None:
        check_too_long(self.too_long)

    @property
    def columns(self) -> list[str]:
        return [self.source_column, self.target_column]

    def fingerprint(self, block_size: int, *, trained: bool = False) -> dict[str, Any]:
        return {"encoder": "pairs", "version": 1, "block_size": block_size, **asdict(self)}

    def train(self, documents: list[dict[str, Any]], vocab_size: int) -> PreTrainedTokenizerBase:
        texts: list[str] = []
        for record in documents:
            with suppress(DocumentError):  # encoding names and counts a bad record
                texts += self.texts(record)
        return train_tokenizer(texts, vocab_size, whole_sequences=True)

    def encoder(self, tokenizer: PreTrainedTokenizerBase, block_size: int) -> "PairEncoder":
        return PairEncoder(tokenizer, block_size, self)

    def texts(self, record: Any) -> tuple[str, str]:
        """Return the source and the target.

        Raises:
            DocumentError: A column is missing, or holds no text.
        """
        source, target = (
            text_field(record, column, "data.source_column and data.target_column") for column in self.columns
        )
        return source, target


class PairEncoder:
    """Encode ``tokenizer(source)`` and ``tokenizer(text_target=target)``, with the tokenizer's own special tokens.

    A target ends with the end-of-text token also where the tokenizer does not append it, so that a model learns to
    stop. Special tokens that a text spells out are encoded as ordinary text.

    Args:
        tokenizer: With an end-of-text token.
        block_size: The most tokens of a source, and of a target.
        encoding: The columns, and what becomes of longer pairs.

    Raises:
        UserError: The tokenizer has no end-of-text token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, block_size: int, encoding: PairEncoding) -> None:
        self.tokenizer = tokenizer
        self.block_size = block_size
        self.encoding = encoding
        eos = end_of_text(tokenizer, "which ends every target")
        self._end = [] if eos in tokenizer(text_target="a")["input_ids"] else [eos]

    def fingerprint(self) -> dict[str, Any]:
        return encoder_fingerprint(self.encoding, self.tokenizer, self.block_size)

    def __call__(self, documents: list[dict[str, Any]]) -> list[Encoded]:
        texts = [self.encoding.texts(record) for record in documents]
        if not texts:
            return []
        sources = self._tokens([source for source, _ in texts])
        targets = self._tokens([target for _, target in texts], is_target=True)
        return [self._pair(*pair) for pair in zip(texts, sources, targets, strict=True)]

    def _tokens(self, texts: list[str], *, is_target: bool = False, **options: Any) -> list[list[int]]:
        end = self._end if is_target else []
        if options:
            options["max_length"] -= len(end)
        role = {"text_target": texts} if is_target else {"text": texts}
        encoded = tokenize(self.tokenizer, split_special_tokens=True, **role, **options)["input_ids"]
        return [[*tokens, *end] for tokens in encoded]

    def _pair(self, texts: tuple[str, str], source: list[int], target: list[int]) -> Encoded:
        for text, role in zip(texts, ("source", "target"), strict=True):
            if not text.strip():
                return leave_out(f"left out: the {role} is empty")
        longest = max(len(source), len(target))
        if left_out := is_left_out(longest, self.block_size, self.encoding.too_long):
            return left_out
        notes = (f"cut to {self.block_size} tokens",) if longest > self.block_size else ()
        if len(source) > self.block_size:
            (source,) = self._tokens([texts[0]], truncation=True, max_length=self.block_size)
        if len(target) > self.block_size:
            (target,) = self._tokens([texts[1]], is_target=True, truncation=True, max_length=self.block_size)
        tokens = np.array([*source, *target], dtype=np.int64)
        return Encoded(tokens, np.arange(len(tokens)) >= len(source), notes)
