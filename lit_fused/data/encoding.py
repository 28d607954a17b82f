"""Define how documents become tokens, and encode plain text."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from lit_fused.data.tokenizer import MIN_VOCAB_SIZE, train_tokenizer
from lit_fused.errors import UserError, check_choice, check_number

Packing = Literal["stream", "documents", "none", "pairs", "padded", "packed"]
TooLong = Literal["cut", "skip"]


@dataclass(frozen=True)
class Encoded:
    """The tokens of one document, its end-of-text token among them if it has one."""

    tokens: npt.NDArray[np.integer[Any]]  # (n,); a document without any is left out, and counted
    loss_mask: npt.NDArray[Any] | None = None  # (n,), the weight of each token's loss, or a bool; None: 1 everywhere
    notes: tuple[str, ...] = ()  # for a person ("cut to 4096 tokens"); the preparation counts each
    ends: tuple[int, ...] | None = None  # the index after each, if it is stored as several documents; None: one


class LeftOut(UserError):  # noqa: N818 (it is a reason, not a mistake)
    """Says why a document of the right form is left out."""


class Encoding:
    """A kind of documents, and how they become tokens: a dataclass of options, and with a tokenizer, which may be
    trained on the documents first, a picklable function of documents.

    Attributes:
        packings: How its documents may become rows, the default first (see ``lit_fused/data/packing.py``).
        min_vocab_size: The fewest entries of a tokenizer that is trained for it.
        whole_sequences: How that is trained, see :func:`lit_fused.data.tokenizer.train_tokenizer`.
        text_column: The column that is the document, a text; None: the document is the whole record.
        mask_probability: See :class:`TextEncoding`.
        tokenizer: Of what :meth:`encoder` returns.
        block_size: Of what :meth:`encoder` returns; the most tokens of a document, for encodings that limit them.
        columns: Those of the data whose records are encoded; a record has those alone in which it has something.
    """

    packings: ClassVar[tuple[Packing, ...]] = ("documents", "none", "stream")
    min_vocab_size: ClassVar[int] = MIN_VOCAB_SIZE
    whole_sequences: ClassVar[bool] = False
    text_column: str | None = None
    mask_probability: float | str | None = None
    tokenizer: PreTrainedTokenizerBase
    block_size: int
    columns: Sequence[str] = ()

    def training_texts(self, document: Any) -> Sequence[str]:
        """Return the texts of a document on which a tokenizer is trained."""
        return [document]

    def train(self, documents: list[Any], vocab_size: int) -> PreTrainedTokenizerBase:
        """Train a tokenizer of at most ``vocab_size`` entries."""
        texts: list[str] = []
        for document in documents:
            with suppress(UserError):  # encoding names a bad record
                texts += self.training_texts(document)
        options = {"whole_sequences": self.whole_sequences, "mask_token": self.mask_probability is not None}
        return train_tokenizer(texts, vocab_size, **options)

    def rows(self, rows: Any, tokenizer: Any, seed: int) -> Any:
        """Return the samples of rows of its tokens, of which one may mask some."""
        return rows

    def encoder(self, tokenizer: PreTrainedTokenizerBase, block_size: int) -> Any:
        """Return this encoding with a tokenizer, a function of a list of documents."""
        found = copy(self)
        found.tokenizer, found.block_size = tokenizer, block_size
        found.prepare()
        return found

    def prepare(self) -> None:
        """Find out what the encoding of every document needs."""

    def __call__(self, documents: list[Any]) -> list[Encoded]:
        """Encode each document; raise ``UserError`` if one is of another form."""
        return [self._or_left_out(document) for document in documents]

    def _or_left_out(self, document: Any) -> Encoded:
        try:
            return self.encode(document)
        except LeftOut as reason:
            return leave_out(reason)

    def encode(self, document: Any) -> Encoded:
        """Encode a document; raise ``LeftOut`` if nothing can be learned from it."""
        raise NotImplementedError

    def tokenize(self, text: list[str] | None = None, **options: Any) -> Mapping[str, Any]:
        """Return what the tokenizer makes of texts, as lists."""
        return self.tokenizer(text, return_attention_mask=False, verbose=False, **options)

    def end_of_text(self, role: str) -> int:
        """Return the end-of-text token, if there is one; ``role`` says what it is for ("which ends every answer")."""
        if not isinstance(self.tokenizer.eos_token_id, int):
            raise UserError(
                f"the tokenizer {self.tokenizer.name_or_path} has no end-of-text token, {role}; "
                "give it one: tokenizer.eos_token = '...', and tokenizer.save_pretrained(FOLDER)"
            )
        return self.tokenizer.eos_token_id


@dataclass(kw_only=True)
class RecordEncoding(Encoding):
    """Documents are records, with loss on some of their tokens.

    Attributes:
        too_long: A document of more than ``block_size`` tokens is cut ("cut") or left out ("skip"). One without an
            answer after that is left out. Both are counted.
    """

    too_long: TooLong = "cut"

    def __post_init__(self) -> None:
        check_choice("data.too_long", self.too_long, get_args(TooLong))

    def fit_block(self, document: Encoded, block_size: int) -> Encoded:
        """Return ``document``, cut or left out if it is too long; left out if its first token alone is wanted."""
        tokens, loss_mask = document.tokens, document.loss_mask
        assert loss_mask is not None
        is_cut = len(tokens) > block_size
        if is_cut and self.too_long == "skip":
            return leave_out(f"longer than data.block_size={block_size}")
        if not loss_mask[1:block_size].any():
            return leave_out("no answer" + f" begins within data.block_size={block_size} tokens" * is_cut)
        notes = document.notes + (f"cut to {block_size} tokens",) * is_cut
        return Encoded(tokens[:block_size], loss_mask[:block_size], notes)


def context_and_answer(context: list[int], answer: list[int], notes: tuple[str, ...] = ()) -> Encoded:
    """Return the document of both, with loss on the answer's tokens only."""
    tokens = np.array([*context, *answer], dtype=np.int64)
    return Encoded(tokens, np.arange(len(tokens)) >= len(context), notes)


def as_mask(weights: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """Return weights as bool if each is 0 or 1, else as they are."""
    return weights != 0 if np.isin(weights, (0, 1)).all() else weights


def with_prompt(document: Encoded) -> Encoded:
    """Return a document with loss on all of its tokens."""
    return replace(document, loss_mask=np.ones(len(document.tokens), np.bool_))


def joined(parts: Sequence[Encoded], notes: tuple[str, ...]) -> Encoded:
    """Return parts with wanted tokens as one document that is stored as several."""
    loss_mask = [part.loss_mask for part in parts if part.loss_mask is not None]
    ends = np.cumsum([len(part.tokens) for part in parts if len(part.tokens)])
    return Encoded(
        np.concatenate([part.tokens for part in parts]), np.concatenate(loss_mask), notes, tuple(ends.tolist())
    )


def leave_out(reason: object) -> Encoded:
    """Return a document without tokens, which the preparation leaves out and counts."""
    return Encoded(np.empty(0, np.int64), np.empty(0, np.bool_), (f"left out: {reason}",))


@dataclass
class TextEncoding(Encoding):
    """Documents are text, on all of which loss is wanted, or on tokens that are masked.

    Each is ended by the end-of-text token; without such a token, framed as by the tokenizer itself (BERT's [CLS] and
    [SEP]). It begins with the beginning-of-text token where the tokenizer itself puts one in front of a text (Llama 3,
    Gemma). Special tokens that it spells out are encoded as ordinary text.

    Attributes:
        text_column: The field or column that holds the text.
        mask_probability: For masked language models, the share of tokens that is chosen to be predicted; "diffusion":
            of a row with n tokens k, with k drawn anew for each row, all masked, with weights n / k. None: no token.
        mask_replaced, mask_random: The shares of chosen tokens that become the mask token and a random token. The
            others stay as they are.
    """

    packings = ("stream", "documents", "none")

    text_column: str | None = "text"
    mask_probability: float | str | None = None
    mask_replaced: float = 0.8
    mask_random: float = 0.1

    def __post_init__(self) -> None:
        if self.mask_probability not in (None, "diffusion"):
            check_number(
                "data.mask_probability", self.mask_probability, "be between 0 and 1, or diffusion", lambda x: 0 < x < 1
            )
        for name, share in {"mask_replaced": self.mask_replaced, "mask_random": self.mask_random}.items():
            check_number(f"data.{name}", share, "be from 0 to 1", lambda x: 0 <= x <= 1)

    def rows(self, rows: Any, tokenizer: Any, seed: int) -> Any:
        if self.mask_probability is None:
            return rows
        from lit_fused.data.masked_rows import MaskedRows

        return MaskedRows(rows, tokenizer, self, seed)

    def encoder(self, tokenizer: PreTrainedTokenizerBase, block_size: int) -> Any:
        return super().encoder(tokenizer, 0)  # Its tokens are the same for blocks of any size.

    def prepare(self) -> None:
        tokenizer = self.tokenizer
        framed = tokenizer("a")["input_ids"]
        bos = tokenizer.bos_token_id
        self.prefix = [bos] if isinstance(bos, int) and framed[:1] == [bos] and len(framed) > 1 else []
        plain = tokenizer("a", add_special_tokens=False)["input_ids"]
        if tokenizer.eos_token_id is None and framed != plain and framed[-1:] != plain[-1:]:
            middle = framed.index(plain[0])
            self.prefix, self.suffix = framed[:middle], framed[middle + len(plain) :]
        else:
            self.suffix = [self.end_of_text("which every document ends with")]

    def __call__(self, documents: list[str]) -> list[Encoded]:
        texts = self.tokenize(documents, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [Encoded(np.array([*self.prefix, *ids, *self.suffix], np.uint32)) for ids in texts]
