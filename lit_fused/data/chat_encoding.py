"""Encode conversations: what the chat template makes of them, with loss on the assistant's tokens only."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

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
from lit_fused.data.encoding import Packing, encoder_fingerprint, tokenize
from lit_fused.data.source import DocumentError
from lit_fused.data.store import Encoded
from lit_fused.data.tokenizer import MIN_VOCAB_SIZE, train_tokenizer
from lit_fused.data.truncation import TooLong, check_too_long, fit_block, join, leave_out
from lit_fused.errors import UserError


@dataclass(frozen=True)
class ChatEncoding:
    """Documents are conversations, with loss on what the assistant says.

    A record is ``{"messages": [{"role", "content"}, ...]}``, perhaps with ``"tools"``, or ShareGPT's
    ``{"conversations": [{"from", "value"}, ...]}``.

    Attributes:
        messages_column: The column of the messages where it has another name.
        chat_template: None: the tokenizer's own. Or "chatml", or a file with a template (Jinja). A tokenizer that is
            trained on the conversations has ChatML.
        template_kwargs: What else the template reads, such as ``{"enable_thinking": False}``.
        too_long: A conversation of more than ``block_size`` tokens is cut ("cut"), left out ("skip") or refused
            ("refuse"). One without an answer after that is left out, and counted.
    """

    kind: ClassVar[str] = "chat"
    packings: ClassVar[tuple[Packing, ...]] = ("documents", "none", "stream")
    min_vocab_size: ClassVar[int] = MIN_VOCAB_SIZE + len(CHATML_TOKENS)
    text_column = None

    messages_column: str | None = None
    chat_template: str | Path | None = None
    template_kwargs: Mapping[str, Any] | None = None
    too_long: TooLong = "cut"

    def __post_init__(self) -> None:
        check_too_long(self.too_long)
        object.__setattr__(self, "template_kwargs", dict(self.template_kwargs or {}))

    @property
    def columns(self) -> list[str]:
        return [*([self.messages_column] if self.messages_column else MESSAGES_COLUMNS), "tools"]

    def fingerprint(self, block_size: int, *, trained: bool = False) -> dict[str, Any]:
        names = ("too_long", "messages_column", "template_kwargs")
        options = {"block_size": block_size} | {name: getattr(self, name) for name in names}
        if trained:  # the options are a list so that caches of earlier versions are found
            options = {"chat_template": self._template, "options": [*options.values()]}
        return {"encoder": "chat", "version": 1, **options}

    @property
    def _template(self) -> str:
        return CHATML if self.chat_template is None else read_chat_template(self.chat_template)

    def train(self, documents: list[dict[str, Any]], vocab_size: int) -> PreTrainedTokenizerBase:
        texts: list[str] = []
        for record in documents:
            with suppress(UserError):  # encoding names and counts a bad record
                messages, _ = read_conversation(record, self.messages_column)
                texts += [message["content"] for message in messages if message.get("content")]
        tokenizer = train_tokenizer(texts, vocab_size - len(CHATML_TOKENS))
        tokenizer.add_special_tokens({"extra_special_tokens": [CHATML_TOKENS[0]], "eos_token": CHATML_TOKENS[1]})
        tokenizer.chat_template = self._template
        return tokenizer

    def encoder(self, tokenizer: PreTrainedTokenizerBase, block_size: int) -> "ChatEncoder":
        return ChatEncoder(with_chat_template(tokenizer, self.chat_template), block_size, self)


class ChatEncoder:
    """Make a conversation's tokens as ``tokenizer.apply_chat_template`` does; loss is wanted on the assistant's.

    What the assistant says includes the token that ends its turn. Messages without anything to learn (empty answers)
    are context. A conversation without any other is left out and counted; what follows the last answer is left out.

    Args:
        tokenizer: A fast tokenizer with a chat template.
        block_size: The most tokens of a document.
        encoding: The columns, what the template reads, and what becomes of longer documents.

    Raises:
        UserError: The tokenizer has no chat template, or cannot tell which characters a token holds.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, block_size: int, encoding: ChatEncoding | None = None
    ) -> None:
        if not tokenizer.is_fast:
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path} ({type(tokenizer).__name__}) does not tell which characters a "
                "token holds, without which the assistant's tokens cannot be found; use its fast version"
            )
        self.tokenizer = tokenizer
        self.block_size = block_size
        self.encoding = encoding or ChatEncoding()
        self._renderer = ConversationRenderer(tokenizer, self.encoding.template_kwargs)
        self._tails: dict[str, npt.NDArray[np.int64]] = {}
        self._added = np.array(sorted(tokenizer.added_tokens_decoder), dtype=np.int64)

    def fingerprint(self) -> dict[str, Any]:
        return encoder_fingerprint(self.encoding, self.tokenizer, self.block_size)

    def __call__(self, documents: list[dict[str, Any]]) -> list[Encoded]:
        conversations = [self._render(record) for record in documents]
        texts = [document.text for conversation in conversations for document in conversation]
        tokens = iter(self._tokens(texts))
        return [self._encode(conversation, [next(tokens) for _ in conversation]) for conversation in conversations]

    def _render(self, record: Any) -> list[RenderedDocument]:
        try:
            return self._renderer.documents(*read_conversation(record, self.encoding.messages_column))
        except UserError as error:
            raise DocumentError(str(error)) from error

    def _tokens(self, texts: list[str]) -> list[tuple[npt.NDArray[np.int64], list[tuple[int, int]]]]:
        """Return the tokens of each text, and the characters that each token holds."""
        if not texts:
            return []
        encoded = tokenize(self.tokenizer, texts, add_special_tokens=False, return_offsets_mapping=True)
        return [
            (np.asarray(ids, dtype=np.int64), offsets)
            for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        ]

    def _encode(
        self, conversation: list[RenderedDocument], tokens: list[tuple[npt.NDArray[np.int64], list[tuple[int, int]]]]
    ) -> Encoded:
        if not conversation:
            return leave_out("left out: the assistant says nothing")
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
        return join([fit_block(part, self.block_size, self.encoding.too_long) for part in parts], tuple(notes))

    def _are_as_given(
        self,
        document: RenderedDocument,
        ids: npt.NDArray[np.int64],
        offsets: list[tuple[int, int]],
        fixed: npt.NDArray[np.bool_],
    ) -> bool:
        """Check that each prompt has the tokens that a model is given, and that no token crosses its border.

        Added tokens divide a text: what stands before the last of them is encoded in the same way whatever follows.
        """
        begins, ends = np.array(offsets).T
        for begin, _ in document.wanted:
            before = np.flatnonzero(fixed & (begins < begin))
            first = int(before[-1]) if len(before) else 0
            tail = self._tail_tokens(document.text[begins[first] if len(before) else 0 : begin])
            there = slice(first, first + len(tail))
            # A fixed token may reach further: it swallows the white space after it, in a prompt as well.
            if not np.array_equal(ids[there], tail) or (~fixed[there] & (ends[there] > begin)).any():
                return False
        return True

    def _tail_tokens(self, tail: str) -> npt.NDArray[np.int64]:
        """Return the tokens of the end of a prompt, which is the same for nearly all prompts."""
        if tail not in self._tails:
            if len(self._tails) == 1000:
                self._tails.clear()
            ((self._tails[tail], _),) = self._tokens([tail])
        return self._tails[tail]

    def _prompt_and_answer(self, text: str, begin: int, end: int) -> Encoded:
        """Encode the prompt as a model is given it, and the answer alone."""
        (prompt, _), (answer, _), (whole, _) = self._tokens([text[:begin], text[begin:end], text[:end]])
        tokens = np.concatenate([prompt, answer])
        if self.tokenizer.decode(tokens) != self.tokenizer.decode(whole):
            raise DocumentError(
                f"the prompt's end {text[max(0, begin - 20) : begin]!r} and the answer's beginning "
                f"{text[begin : begin + 20]!r} share a token, and the tokenizer cannot encode the answer alone"
            )
        return Encoded(tokens, np.arange(len(tokens)) >= len(prompt))


def with_chat_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | Path | None) -> PreTrainedTokenizerBase:
    """Return ``tokenizer`` with its own chat template (None), ours ("chatml"), or that of a file.

    ChatML's two tokens are added to a tokenizer that lacks them; the model's vocabulary grows with it.

    Raises:
        UserError: There is no such file.
    """
    if chat_template is None:
        return tokenizer
    tokenizer.chat_template = read_chat_template(chat_template)
    if tokenizer.chat_template == CHATML:
        missing = [token for token in CHATML_TOKENS if token not in tokenizer.get_vocab()]
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in missing])
        tokenizer.eos_token = CHATML_TOKENS[1]  # generation stops there
    return tokenizer


def read_chat_template(chat_template: str | Path) -> str:
    """Return the text of a template: ours for "chatml", else that of the file."""
    if chat_template == "chatml":
        return CHATML
    path = Path(chat_template).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"data.chat_template must be chatml or a file with a Jinja template; {path} cannot be read: {error}"
        ) from error
