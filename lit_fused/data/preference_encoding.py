"""Encode preferences: a prompt with a chosen and a rejected answer, or with one answer and whether it is desirable.

In the store a preference is two documents, prompt and answer each, the chosen one first. Where there is one answer
alone, the other document is a token on which no loss is wanted. Answers are encoded by the encodings of instructions
and of conversations, so prompts, borders and masks are theirs.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lit_fused.data.chat_encoding import ChatEncoding
from lit_fused.data.chat_template import says
from lit_fused.data.encoding import Encoded, Encoder, RecordEncoding, joined, leave_out, no_column
from lit_fused.data.pair_encoding import InstructionEncoding
from lit_fused.errors import UserError

_OPTIONS = "data.prompt, data.chosen, data.rejected, data.completion or data.label"


class PreferenceEncoder(Encoder["PreferenceEncoding"]):
    """Encode each answer behind its prompt, texts as ``InstructionEncoder`` and conversations as ``ChatEncoder`` do."""

    def __post_init__(self) -> None:
        self._encoders: dict[bool, Encoder[Any]] = {}  # of texts or not, made when there are some
        if self.encoding.chat_template is not None:  # It may add tokens, which the store has to know before.
            self._encoders[False] = self.encoding.conversations.encoder(self.tokenizer, sys.maxsize)

    def __call__(self, documents: list[dict[str, Any]]) -> list[Encoded]:
        return list(map(self._preference, documents))

    def _preference(self, record: dict[str, Any]) -> Encoded:
        answers = self.encoding.answers(record)
        if len(answers) == 2 and answers[0][1] == answers[1][1]:
            return leave_out("left out: the chosen and the rejected answer are the same")
        sides = [self._side(*answer, record) for answer in answers]
        notes = tuple(dict.fromkeys(note for side in sides for note in side.notes))
        if not all(len(side.tokens) for side in sides):
            return leave_out(notes[0])
        if len(sides) == 1:
            nothing = Encoded(sides[0].tokens[:1], np.zeros(1, np.bool_))
            sides = [sides[0], nothing] if self.encoding.is_desirable(record) else [nothing, sides[0]]
        elif np.array_equal(sides[0].tokens, sides[1].tokens):
            return leave_out(f"left out: both answers are the same within data.block_size={self.block_size} tokens")
        return joined(sides, notes)

    def _side(self, prompt: Any, answer: Any, record: Mapping[str, Any]) -> Encoded:
        is_text = isinstance(answer, str)
        if is_text not in self._encoders:
            kind = InstructionEncoding() if is_text else self.encoding.conversations
            self._encoders[is_text] = kind.encoder(self.tokenizer, sys.maxsize)  # Sides are cut below.
        if is_text:
            (side,) = self._encoders[True]([{"prompt": prompt, "completion": answer}])
        else:
            turns = sum(message["role"] == "assistant" and says(message) for message in answer)
            if not turns:
                return leave_out("left out: the assistant says nothing in an answer")
            (side,) = self._encoders[False]([{"messages": [*prompt, *answer], "tools": record.get("tools")}])
            side = _last_part(side, turns)
        return self.encoding.fit_block(side, self.block_size) if len(side.tokens) else side


@dataclass(frozen=True)
class PreferenceEncoding(RecordEncoding):
    """Documents are ``{"prompt", "chosen", "rejected"}``, or ``{"prompt", "completion", "label"}`` with a label that is
    true or false. Prompt and answers are texts, or lists of messages ``{"role", "content"}``; chosen and rejected
    conversations may also begin with the prompt's messages, without a "prompt". Loss is on the last answer.

    Attributes:
        prompt, chosen, rejected, completion, label: The columns, where they have other names.
        chat_template, template_kwargs: Of conversations, see :class:`lit_fused.data.ChatEncoding`.
        too_long: A preference of which one side has more than ``block_size`` tokens is cut ("cut"), left out ("skip")
            or refused ("refuse"). A cut one whose prompt alone fills the block is left out.
    """

    made_by = PreferenceEncoder
    packings = ("padded", "packed")
    min_vocab_size = ChatEncoding.min_vocab_size

    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"
    completion: str | None = None
    label: str = "label"
    chat_template: str | Path | None = None
    template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "template_kwargs", dict(self.template_kwargs or {}))

    @property
    def answer(self) -> str:
        """Return the column of single answers."""
        return self.completion or "completion"

    @property
    def columns(self) -> list[str]:
        return [self.prompt, self.chosen, self.rejected, self.answer, self.label, "tools"]

    @property
    def conversations(self) -> ChatEncoding:
        """Return how conversations are encoded."""
        return ChatEncoding(chat_template=self.chat_template, template_kwargs=self.template_kwargs)

    def training_texts(self, document: dict[str, Any]) -> list[str]:
        texts: list[Any] = []
        for prompt, answer in self.answers(document):
            texts += [prompt, answer] if isinstance(answer, str) else [m.get("content") for m in [*prompt, *answer]]
        return [text for text in texts if isinstance(text, str)]

    def train(self, documents: list[dict[str, Any]], vocab_size: int) -> PreTrainedTokenizerBase:
        if all(isinstance(document.get(self.chosen, document.get(self.answer)), str) for document in documents):
            return super().train(documents, vocab_size)
        texts = [{"messages": [{"content": text}]} for document in documents for text in self.training_texts(document)]
        return self.conversations.train(texts, vocab_size)

    def answers(self, record: Mapping[str, Any]) -> list[tuple[Any, Any]]:
        """Return the prompt with each answer: two, the chosen one first, or a single one."""
        single = self.chosen not in record and self.rejected not in record and self.answer in record
        names = [self.answer] if single else [self.chosen, self.rejected]
        for name in [*names, *([self.label] if single else [])]:
            if name not in record:
                raise UserError(no_column(name, record, _OPTIONS))
        answers = [record[name] for name in names]
        prompt = record.get(self.prompt)
        if prompt is None:
            prompt = _common_messages(answers, self.prompt, record)
            answers = [answer[len(prompt) :] for answer in answers]
        is_text = isinstance(prompt, str)
        for name, value in zip([self.prompt, *names], [prompt, *answers], strict=True):
            if not (isinstance(value, str) if is_text else _are_messages(value)):
                raise UserError(
                    f"the columns {self.prompt!r} and {name!r} must both hold text, or both lists of messages "
                    f'{{"role", "content"}}; got {type(prompt).__name__} and {type(value).__name__} {str(value)[:60]!r}'
                )
        return [(prompt, answer) for answer in answers]

    def is_desirable(self, record: Mapping[str, Any]) -> bool:
        """Return the label of a single answer."""
        label = record[self.label]
        if not isinstance(label, bool | np.bool_) and label not in (0, 1):
            raise UserError(f"the column {self.label!r} must be true or false; got {str(label)[:60]!r}")
        return bool(label)


def _last_part(side: Encoded, turns: int) -> Encoded:
    """Return the part of a conversation with its last answers, of so many turns, with loss on these alone."""
    start, end = (0, *(side.ends or (len(side.tokens),)))[-2:]  # A template may have divided the conversation.
    assert side.wanted is not None
    tokens, wanted = side.tokens[start:end], side.wanted[start:end]
    begins = np.flatnonzero(wanted & ~np.concatenate([[False], wanted[:-1]]))
    first = begins[-min(turns, len(begins))] if len(begins) else 0
    return Encoded(tokens, wanted & (np.arange(len(tokens)) >= first), side.notes)


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(m, Mapping) and "role" in m for m in value)


def _common_messages(answers: list[Any], prompt: str, record: Mapping[str, Any]) -> list[Any]:
    """Return the messages with which all answers begin, up to the last one of a user or of what tools answer."""
    if not all(map(_are_messages, answers)):
        raise UserError(no_column(prompt, record, _OPTIONS))
    common = 0
    while all(len(a) > common + 1 and a[common] == answers[0][common] for a in answers):
        common += 1
    while common and answers[0][common - 1]["role"] == "assistant":
        common -= 1
    if not common:
        raise UserError(
            f"there is no {prompt!r}, and the conversations do not begin with the same messages; give each record a "
            "prompt, or conversations that have one"
        )
    return answers[0][:common]
