"""Encode conversations: what the chat template makes of them, with loss on the assistant's tokens only."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import AddedToken, PreTrainedTokenizerBase

from lit_fused.data.chat_template import (
    CHATML,
    CHATML_TOKENS,
    MESSAGES_COLUMNS,
    ConversationRenderer,
    Flags,
    RenderedDocument,
    Span,
    read_conversation,
    wanted_tokens,
)
from lit_fused.data.encoding import Encoded, Encoder, RecordEncoding, context_and_answer, joined, leave_out
from lit_fused.data.tokenizer import MIN_VOCAB_SIZE
from lit_fused.errors import UserError

Tokens = tuple[npt.NDArray[np.int64], list[Span]]  # a text's tokens, and the characters of each


class ChatEncoder(Encoder["ChatEncoding"]):
    """Make a conversation's tokens as ``tokenizer.apply_chat_template`` does; loss is wanted on the assistant's.

    What the assistant says includes the token that ends its turn. Messages without anything to learn (empty answers)
    are context. A conversation without any other is left out and counted; what follows the last answer is left out.
    The tokenizer needs a chat template, and has to tell which characters a token holds.
    """

    def __post_init__(self) -> None:
        tokenizer = with_chat_template(self.tokenizer, self.encoding.chat_template)
        if not tokenizer.is_fast:
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path} ({type(tokenizer).__name__}) does not tell which characters a "
                "token holds, without which the assistant's tokens cannot be found; use its fast version"
            )
        self._renderer = ConversationRenderer(tokenizer, self.encoding.template_kwargs)
        self._added = np.array(sorted(tokenizer.added_tokens_decoder), dtype=np.int64)

    def __call__(self, documents: list[dict[str, Any]]) -> list[Encoded]:
        try:
            column = self.encoding.messages_column
            conversations = [self._renderer.documents(*read_conversation(record, column)) for record in documents]
        except UserError as error:
            raise UserError(str(error)) from error
        tokens = iter(self._tokens([document.text for conversation in conversations for document in conversation]))
        return [self._encode(conversation, [next(tokens) for _ in conversation]) for conversation in conversations]

    def _tokens(self, texts: list[str]) -> list[Tokens]:
        if not texts:
            return []
        encoded = self.tokenize(texts, add_special_tokens=False, return_offsets_mapping=True)
        arrays = [np.asarray(ids, dtype=np.int64) for ids in encoded["input_ids"]]
        return list(zip(arrays, encoded["offset_mapping"], strict=True))

    def _encode(self, conversation: list[RenderedDocument], tokens: list[Tokens]) -> Encoded:
        if not conversation:
            return leave_out("left out: the assistant says nothing")
        notes = ["divided: the chat template rewrites earlier answers"] * (len(conversation) > 1)
        if not all(document.stops for document in conversation):
            notes.append("no token ends the answers: a model does not learn to stop")
        parts: list[Encoded] = []
        for document, (ids, offsets) in zip(conversation, tokens, strict=True):
            fixed = np.isin(ids, self._added)
            if document.follows_prompts and not self._are_as_given(document, (ids, offsets), fixed):
                notes.append("divided: prompts are encoded otherwise with an answer behind them")
                parts += [self._prompt_and_answer(document.text, *span) for span in document.wanted]
            else:
                parts.append(Encoded(ids, wanted_tokens(offsets, document.wanted, fixed)))
        fitted = [self.encoding.fit_block(part, self.block_size) for part in parts]
        return joined(fitted, (*notes, *(note for part in fitted for note in part.notes)))

    def _are_as_given(self, document: RenderedDocument, tokens: Tokens, fixed: Flags) -> bool:
        """Check that each prompt has the tokens that a model is given, and that no token crosses its border. Added
        tokens divide a text: what precedes the last of them is encoded alike whatever follows."""
        ids, (begins, ends) = tokens[0], np.array(tokens[1]).T
        for begin, _ in document.wanted:
            before = np.flatnonzero(fixed & (begins < begin))
            first = int(before[-1]) if len(before) else 0
            ((tail, _),) = self._tokens([document.text[begins[first] if len(before) else 0 : begin]])
            there = slice(first, first + len(tail))
            # A fixed token may reach further: it swallows the white space after it, in a prompt as well.
            if not np.array_equal(ids[there], tail) or (~fixed[there] & (ends[there] > begin)).any():
                return False
        return True

    def _prompt_and_answer(self, text: str, begin: int, end: int) -> Encoded:
        """Encode the prompt as a model is given it, and the answer alone."""
        parts = text[:begin], text[begin:end], text[:end]
        prompt, answer, whole = (ids.tolist() for ids, _ in self._tokens([*parts]))
        self.check_border(parts[0], parts[1], prompt + answer, whole)
        return context_and_answer(prompt, answer)


@dataclass(frozen=True)
class ChatEncoding(RecordEncoding):
    """Documents are conversations, with loss on what the assistant says.

    A record is ``{"messages": [{"role", "content"}, ...]}``, perhaps with ``"tools"``, or ShareGPT's
    ``{"conversations": [{"from", "value"}, ...]}``.

    Attributes:
        messages_column: The column of the messages where it has another name.
        chat_template: None: the tokenizer's own. Or "chatml", or a file with a template (Jinja). A tokenizer that is
            trained on the conversations has ChatML.
        template_kwargs: What else the template reads, such as ``{"enable_thinking": False}``.
    """

    made_by = ChatEncoder
    min_vocab_size = MIN_VOCAB_SIZE + len(CHATML_TOKENS)

    messages_column: str | None = None
    chat_template: str | Path | None = None
    template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "template_kwargs", dict(self.template_kwargs or {}))

    @property
    def columns(self) -> list[str]:
        return [*([self.messages_column] if self.messages_column else MESSAGES_COLUMNS), "tools", "functions"]

    @property
    def _template(self) -> str:
        return CHATML if self.chat_template is None else read_chat_template(self.chat_template)

    def training_texts(self, document: dict[str, Any]) -> list[str]:
        messages, _ = read_conversation(document, self.messages_column)
        return [message["content"] for message in messages if message.get("content")]

    def train(self, documents: list[dict[str, Any]], vocab_size: int) -> PreTrainedTokenizerBase:
        tokenizer = super().train(documents, vocab_size - len(CHATML_TOKENS))
        tokenizer.add_special_tokens({"extra_special_tokens": [CHATML_TOKENS[0]], "eos_token": CHATML_TOKENS[1]})
        tokenizer.chat_template = self._template
        return tokenizer


def with_chat_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | Path | None) -> PreTrainedTokenizerBase:
    """Return ``tokenizer`` with its own chat template (None), ours ("chatml"), or that of a file. ChatML's two tokens
    are added to a tokenizer that lacks them; the model's vocabulary grows with it."""
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
    path = Path(chat_template).expanduser()
    try:
        if chat_template == "chatml":
            return CHATML
        if path.is_file() or not path.exists():  # no pipe, which might never end
            return path.read_text(encoding="utf-8")
        raise OSError("it is no regular file")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"data.chat_template must be chatml or a file with a Jinja template; {path} cannot be read: {error}"
        ) from error
