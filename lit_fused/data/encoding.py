"""The interface of an encoding: how documents become tokens, before and after the tokenizer is known.

An :class:`Encoding` is a choice of columns and rules. With a tokenizer it becomes an :class:`Encoder`, a function from
documents to tokens; without one, an :class:`UntrainedEncoder`, whose tokenizer is trained on the documents first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from transformers import PreTrainedTokenizerBase

from lit_fused.data.source import DocumentError
from lit_fused.data.store import Encoded
from lit_fused.data.tokenizer import tokenizer_digest
from lit_fused.errors import UserError

Packing = Literal["stream", "documents", "none", "pairs"]


class Encoder(Protocol):
    """A picklable function of documents (strings, or records such as ``{"messages": [...]}``)."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    def fingerprint(self) -> dict[str, Any]:
        """Return as JSON everything that changes the result."""
        ...

    def __call__(self, documents: list[Any]) -> list[Encoded]:
        """Encode each document.

        Raises:
            DocumentError: A document cannot be encoded; the caller then encodes each one alone.
        """
        ...


class Encoding(Protocol):
    """A kind of documents, and the way they become tokens. Picklable.

    Attributes:
        kind: Begins the names of the cache's folders.
        packings: How its documents may become rows, the default first (see ``lit_fused/data/packing.py``).
        min_vocab_size: The fewest entries of a tokenizer that is trained for it.
        text_column, columns: See :meth:`lit_fused.data.source.Source.select`.
    """

    kind: ClassVar[str]
    packings: ClassVar[tuple[Packing, ...]]
    min_vocab_size: ClassVar[int]

    @property
    def text_column(self) -> str | None: ...

    @property
    def columns(self) -> Sequence[str]: ...

    def fingerprint(self, block_size: int, *, trained: bool = False) -> dict[str, Any]:
        """Return as JSON everything but the tokenizer that changes the result; ``trained``: one is trained for it."""
        ...

    def train(self, documents: list[Any], vocab_size: int) -> PreTrainedTokenizerBase:
        """Train a tokenizer of at most ``vocab_size`` entries."""
        ...

    def encoder(self, tokenizer: PreTrainedTokenizerBase, block_size: int) -> Encoder:
        """Return the encoder. ``block_size``: the most tokens of a document, for encodings that limit them."""
        ...


@dataclass(frozen=True)
class UntrainedEncoder:
    """An encoder whose tokenizer is yet to be trained, on a bounded sample of the training documents."""

    encoding: Encoding
    block_size: int
    vocab_size: int

    def fingerprint(self) -> dict[str, Any]:
        return {**self.encoding.fingerprint(self.block_size, trained=True), "train": self.vocab_size}

    def train(self, documents: list[Any]) -> PreTrainedTokenizerBase:
        return self.encoding.train(documents, self.vocab_size)

    def build(self, tokenizer: PreTrainedTokenizerBase) -> Encoder:
        return self.encoding.encoder(tokenizer, self.block_size)


def encoder_fingerprint(encoding: Encoding, tokenizer: PreTrainedTokenizerBase, block_size: int) -> dict[str, Any]:
    """Return the fingerprint of an encoding's encoder."""
    return {**encoding.fingerprint(block_size), "tokenizer": tokenizer_digest(tokenizer)}


def tokenize(tokenizer: PreTrainedTokenizerBase, text: list[str] | None = None, **options: Any) -> Mapping[str, Any]:
    """Return what the tokenizer makes of texts: lists, without attention masks.

    Raises:
        DocumentError: A text is no text.
    """
    try:
        return tokenizer(text, return_attention_mask=False, verbose=False, **options)
    except (UnicodeEncodeError, TypeError) as error:
        raise DocumentError("it holds half of a surrogate pair (such as \\ud83d), which is no character") from error


def end_of_text(tokenizer: PreTrainedTokenizerBase, role: str) -> int:
    """Return the end-of-text token.

    Raises:
        UserError: The tokenizer has none. ``role`` says what it is needed for ("which ends every completion").
    """
    if not isinstance(tokenizer.eos_token_id, int):
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} has no end-of-text token, {role}; "
            "give it one: tokenizer.eos_token = '...', and tokenizer.save_pretrained(FOLDER)"
        )
    return tokenizer.eos_token_id


def text_field(record: Any, column: str, options: str) -> str:
    """Return the text in a column of a record.

    Raises:
        DocumentError: The column is missing, or holds no text. ``options`` names the options that choose columns.
    """
    if not isinstance(record, Mapping) or column not in record:
        there = ", ".join(map(str, record)) if isinstance(record, Mapping) else type(record).__name__
        raise DocumentError(
            f"there is no column {column}; those that are there: {there or 'none'}. Set {options} to some of them"
        )
    value = record[column]
    if not isinstance(value, str):
        raise DocumentError(f"the column {column} must hold text; got {type(value).__name__} {str(value)[:60]!r}")
    return value
