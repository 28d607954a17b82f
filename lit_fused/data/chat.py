"""Conversations as documents: what the chat template makes of them, loss on the assistant's tokens only."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import AddedToken, PreTrainedTokenizerBase

from lit_fused.data.chat_records import MESSAGES_COLUMNS, read_conversation
from lit_fused.data.chat_template import (
    CHATML,
    CHATML_TOKENS,
    ConversationRenderer,
    RenderedDocument,
    wanted_tokens,
)
from lit_fused.data.checks import check_int
from lit_fused.data.encoding import DocumentError, Encoder, UntrainedEncoder, tokenizer_digest
from lit_fused.data.module import TokenDataModule
from lit_fused.data.packing import Packing
from lit_fused.data.sources import FileSource
from lit_fused.data.store import Encoded
from lit_fused.data.tokenizer import MIN_VOCAB_SIZE, train_tokenizer
from lit_fused.data.truncation import TooLong, check_too_long, fit_block, join
from lit_fused.errors import UserError


class ChatDataModule(TokenDataModule):
    """Conversations from files: loss on what the assistant says.

    Args:
        path: A ``.jsonl`` or ``.parquet`` file, compressed or not, or a folder of them: see
            :class:`lit_fused.data.sources.FileSource`. A record is ``{"messages": [{"role", "content"}, ...]}``,
            perhaps with ``"tools"``, or ShareGPT's ``{"conversations": [{"from", "value"}, ...]}``.
        messages_column: The column of the messages where it has another name.
        chat_template: None: the tokenizer's own. Or "chatml", or a file with a template (Jinja). A tokenizer that is
            trained on the conversations has ChatML.
        template_kwargs: What else the template reads, such as ``{"enable_thinking": False}``.
        too_long: A conversation of more than ``block_size`` tokens is cut ("cut"), left out ("skip") or refused
            ("refuse"). One that is left without an answer is left out, and counted.
        encoding: Of JSON files.

    The other arguments are :class:`~lit_fused.data.module.TokenDataModule`'s.

    Raises:
        UserError: A value is out of range, at construction; ``prepare_data`` and ``setup`` raise it for files that are
            missing, bad or empty, and for a tokenizer without a chat template.
    """

    kind = "chat"

    def __init__(
        self,
        path: str | Path,
        messages_column: str | None = None,
        chat_template: str | Path | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        too_long: TooLong = "cut",
        encoding: str = "utf-8",
        block_size: int = 1024,
        batch_size: int = 8,
        val_fraction: float = 0.05,
        tokenizer: str | Path | None = None,
        vocab_size: int = 16384,
        max_bad_documents: int = 0,
        cache_dir: str | Path | None = None,
        num_workers: int = 0,
        prepare_workers: int | None = None,
        packing: Packing = "documents",
        seed: int = 0,
    ) -> None:
        super().__init__(
            block_size=block_size,
            batch_size=batch_size,
            val_fraction=val_fraction,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            max_bad_documents=max_bad_documents,
            cache_dir=cache_dir,
            num_workers=num_workers,
            prepare_workers=prepare_workers,
            packing=packing,
            seed=seed,
        )
        self.source = FileSource(path, None, encoding)
        self.encoding = ChatEncoding(messages_column, chat_template, template_kwargs, too_long)

    def make_source(self) -> FileSource:
        return self.source

    def make_encoder(self, tokenizer: PreTrainedTokenizerBase | None) -> Encoder | UntrainedEncoder:
        return self.encoding.encoder(tokenizer, self.block_size, self.max_vocab_size)


class ChatEncoding:
    """How conversations are read and written, whatever they come from: see :class:`ChatDataModule`."""

    def __init__(
        self,
        messages_column: str | None = None,
        chat_template: str | Path | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        too_long: TooLong = "cut",
    ) -> None:
        check_too_long(too_long)
        self.messages_column = messages_column
        self.chat_template = chat_template
        self.template_kwargs = dict(template_kwargs or {})
        self.too_long: TooLong = too_long

    @property
    def columns(self) -> list[str]:
        """Those of a record that are of use, if it has them."""
        return [*([self.messages_column] if self.messages_column else MESSAGES_COLUMNS), "tools"]

    def encoder(
        self, tokenizer: PreTrainedTokenizerBase | None, block_size: int, vocab_size: int
    ) -> Encoder | UntrainedEncoder:
        """The encoder of a tokenizer, or (None) of one that is yet to be trained, of at most ``vocab_size`` entries."""
        options = (block_size, self.too_long, self.messages_column, self.template_kwargs)
        if tokenizer is not None:
            return ChatEncoder(with_chat_template(tokenizer, self.chat_template), *options)
        check_int("data.vocab_size", vocab_size, MIN_VOCAB_SIZE + len(CHATML_TOKENS))
        template = CHATML if self.chat_template is None else read_chat_template(self.chat_template)
        return UntrainedChatEncoder(vocab_size, template, *options)


class ChatEncoder(Encoder):
    """A conversation's tokens as ``tokenizer.apply_chat_template`` makes them, wanted where the assistant says them.

    What the assistant says includes the token that ends its turn. Messages without anything to learn (empty answers)
    are context; a conversation without any other is left out and counted, as is what follows the last answer.

    Args:
        tokenizer: A fast one, with a chat template.
        block_size: The most tokens of a document.
        too_long: What becomes of a longer one, see :func:`lit_fused.data.truncation.fit_block`.
        messages_column: See :func:`lit_fused.data.chat_records.read_conversation`.
        template_kwargs: What else the template reads, such as ``{"enable_thinking": False}``.

    Raises:
        UserError: The tokenizer has no chat template, or cannot tell which characters a token holds.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        block_size: int,
        too_long: TooLong = "cut",
        messages_column: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not tokenizer.is_fast:
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path} ({type(tokenizer).__name__}) does not tell which characters a "
                "token holds, without which the assistant's tokens cannot be found; use its fast version"
            )
        self._tokenizer = tokenizer
        self.block_size = block_size
        self.too_long: TooLong = too_long
        self.messages_column = messages_column
        self.template_kwargs = dict(template_kwargs or {})
        self._renderer = ConversationRenderer(tokenizer, self.template_kwargs)
        self._tails: dict[str, npt.NDArray[np.int64]] = {}
        self._added = np.array(sorted(tokenizer.added_tokens_decoder), dtype=np.int64)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    def fingerprint(self) -> dict[str, Any]:
        return {
            "encoder": "chat",
            "version": 1,
            "tokenizer": tokenizer_digest(self.tokenizer),
            "block_size": self.block_size,
            "too_long": self.too_long,
            "messages_column": self.messages_column,
            "template_kwargs": self.template_kwargs,
        }

    def __call__(self, documents: list[dict[str, Any]]) -> list[Encoded]:
        conversations = [self._render(record) for record in documents]
        texts = [document.text for conversation in conversations for document in conversation]
        tokens = iter(self._tokens(texts))
        return [self._encode(conversation, [next(tokens) for _ in conversation]) for conversation in conversations]

    def _render(self, record: Any) -> list[RenderedDocument]:
        try:
            return self._renderer.documents(*read_conversation(record, self.messages_column))
        except UserError as error:
            raise DocumentError(str(error)) from error

    def _tokens(self, texts: list[str]) -> list[tuple[npt.NDArray[np.int64], list[tuple[int, int]]]]:
        """The tokens of each text, and the characters that each token holds."""
        if not texts:
            return []
        try:
            encoded = self.tokenizer(
                texts, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True, verbose=False
            )
        except (UnicodeEncodeError, TypeError) as error:
            raise DocumentError("it holds half of a surrogate pair (such as \\ud83d), which is no character") from error
        return [
            (np.asarray(ids, dtype=np.int64), offsets)
            for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        ]

    def _encode(
        self, conversation: list[RenderedDocument], tokens: list[tuple[npt.NDArray[np.int64], list[tuple[int, int]]]]
    ) -> Encoded:
        if not conversation:
            return Encoded(np.empty(0, np.int64), notes=("left out: the assistant says nothing",))
        notes = ["divided: the chat template rewrites earlier answers"] * (len(conversation) > 1)
        if not all(document.stops for document in conversation):
            notes.append("no token ends the answers: a model does not learn to stop")
        parts: list[Encoded] = []
        for document, (ids, offsets) in zip(conversation, tokens, strict=True):
            fixed = np.isin(ids, self._added)
            if document.follows_prompts and not self._are_as_given(document, ids, offsets, fixed):
                notes.append("divided: prompts are encoded otherwise with an answer behind them")
                parts += [self._prompt_and_answer(document.text, *span) for span in document.wanted]
            else:
                parts.append(Encoded(ids, wanted_tokens(offsets, document.wanted, fixed)))
        return join([fit_block(part, self.block_size, self.too_long) for part in parts], tuple(notes))

    def _are_as_given(
        self,
        document: RenderedDocument,
        ids: npt.NDArray[np.int64],
        offsets: list[tuple[int, int]],
        fixed: npt.NDArray[np.bool_],
    ) -> bool:
        """Whether each prompt has the tokens that a model is given, and no token is across its border.

        Added tokens divide a text: what stands before the last of them is encoded in the same way whatever follows.
        """
        begins, ends = np.array(offsets).T
        for begin, _ in document.wanted:
            before = np.flatnonzero(fixed & (begins < begin))
            first = int(before[-1]) if len(before) else 0
            tail = self._tail_tokens(document.text[begins[first] if len(before) else 0 : begin])
            there = slice(first, first + len(tail))
            # A fixed token may reach further: it swallows white space, and so does it when a prompt has some.
            if not np.array_equal(ids[there], tail) or (~fixed[there] & (ends[there] > begin)).any():
                return False
        return True

    def _tail_tokens(self, tail: str) -> npt.NDArray[np.int64]:
        """The tokens of the end of a prompt; nearly all prompts have the same."""
        if tail not in self._tails:
            if len(self._tails) == 1000:
                self._tails.clear()
            ((self._tails[tail], _),) = self._tokens([tail])
        return self._tails[tail]

    def _prompt_and_answer(self, text: str, begin: int, end: int) -> Encoded:
        """The prompt's tokens, as a model is given them, and those of the answer alone."""
        (prompt, _), (answer, _), (whole, _) = self._tokens([text[:begin], text[begin:end], text[:end]])
        tokens = np.concatenate([prompt, answer])
        if self.tokenizer.decode(tokens) != self.tokenizer.decode(whole):
            raise DocumentError(
                f"the prompt's end {text[max(0, begin - 20) : begin]!r} and the answer's beginning "
                f"{text[begin : begin + 20]!r} share a token, and the tokenizer cannot encode the answer alone"
            )
        return Encoded(tokens, np.arange(len(tokens)) >= len(prompt))


class UntrainedChatEncoder:
    """A :class:`ChatEncoder` whose tokenizer is yet to be trained, on what is said; its template is ChatML."""

    def __init__(
        self,
        vocab_size: int,
        chat_template: str,
        block_size: int,
        too_long: TooLong = "cut",
        messages_column: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.chat_template = chat_template
        self.messages_column = messages_column
        self.options = (block_size, too_long, messages_column, dict(template_kwargs or {}))

    def fingerprint(self) -> dict[str, Any]:
        return {
            "encoder": "chat",
            "version": 1,
            "train": self.vocab_size,
            "chat_template": self.chat_template,
            "options": self.options,
        }

    def train(self, documents: list[dict[str, Any]]) -> PreTrainedTokenizerBase:
        texts: list[str] = []
        for record in documents:
            with suppress(UserError):  # it is counted and named when it is encoded
                messages, _ = read_conversation(record, self.messages_column)
                texts += [message["content"] for message in messages if message.get("content")]
        tokenizer = train_tokenizer(texts, self.vocab_size - len(CHATML_TOKENS))
        tokenizer.add_special_tokens({"extra_special_tokens": [CHATML_TOKENS[0]], "eos_token": CHATML_TOKENS[1]})
        tokenizer.chat_template = self.chat_template
        return tokenizer

    def build(self, tokenizer: PreTrainedTokenizerBase) -> ChatEncoder:
        return ChatEncoder(tokenizer, *self.options)


def with_chat_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | Path | None) -> PreTrainedTokenizerBase:
    """``tokenizer``, whose chat template is its own (None), ours ("chatml"), or that of a file.

    ChatML's two tokens are added to a tokenizer that lacks them: the model's vocabulary grows with it.

    Raises:
        UserError: There is no such file.
    """
    if chat_template is None:
        return tokenizer
    tokenizer.chat_template = read_chat_template(chat_template)
    if tokenizer.chat_template == CHATML:
        missing = [token for token in CHATML_TOKENS if token not in tokenizer.get_vocab()]
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in missing])
        tokenizer.eos_token = CHATML_TOKENS[1]  # whoever generates stops there
    return tokenizer


def read_chat_template(chat_template: str | Path) -> str:
    """The text of a template: ours for "chatml", else that of the file."""
    if chat_template == "chatml":
        return CHATML
    path = Path(chat_template).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"data.chat_template must be chatml or a file with a Jinja template; {path} cannot be read: {error}"
        ) from error
