"""Encode preferences: a prompt with a chosen and a rejected answer, or with one answer and whether it is desirable.

In the store a preference is two documents, prompt and answer each, the chosen one first. Where there is one answer
alone, the other document is a token on which no loss is wanted. Answers are encoded as those of instructions.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lit_fused.data.chat_encoding import ChatEncoding
from lit_fused.data.conversations import read_tools, unknown_form
from lit_fused.data.encoding import Encoded, LeftOut, joined
from lit_fused.data.instruction_encoding import InstructionEncoding
from lit_fused.errors import UserError


@dataclass
class PreferenceEncoding(InstructionEncoding):
    """Documents are ``{"prompt", "chosen", "rejected"}``, or ``{"prompt", "completion", "label"}`` with a label that is
    true or false. Prompt and answers are texts, or lists of messages. Loss is on the last answer.

    Chosen and rejected conversations may begin with the prompt's messages. A prompt beside them that is a text is then
    left aside (UltraFeedback); beside answers alone it is the user's message.

    Attributes:
        prompt, completion, chosen, rejected, label: The columns, where they have other names.
        chat_template, template_kwargs: Of conversations.
        too_long: A preference of which one side has more than ``block_size`` tokens is cut ("cut") or left out
            ("skip"). A cut one whose prompt alone fills the block is left out.
    """

    packings = ("padded", "packed")
    min_vocab_size = ChatEncoding.min_vocab_size

    chosen: str = "chosen"
    rejected: str = "rejected"
    label: str = "label"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train_on_prompt:
            raise UserError("data.train_on_prompt is not for preferences, which are learned by their answers")

    def encode(self, document: Mapping[str, Any]) -> Encoded:
        names, of_data = self._answers(document), self._answers(self.columns or document)
        if names != of_data:  # A pair without a second answer would be compared with nothing.
            raise UserError(
                f"it has no {' and no '.join(of_data)}, which others have: data are pairs or single answers"
            )
        prompt, answers = self.prompt_and_answers(document)
        if answers[0] == answers[-1] and len(answers) == 2:
            raise LeftOut("the chosen and the rejected answer are the same")
        sides = [self.answer(prompt, answer, read_tools(document)) for answer in answers]
        sides = [self.fit_block(side, self.block_size) for side in sides]
        if without := [side for side in sides if not len(side.tokens)]:
            return without[0]
        if len(sides) == 1:
            nothing = Encoded(sides[0].tokens[:1], np.zeros(1, np.bool_))
            sides = {True: [sides[0], nothing], False: [nothing, sides[0]]}[document[self.label]]
        elif np.array_equal(sides[0].tokens, sides[1].tokens):
            raise LeftOut(f"both answers are the same within data.block_size={self.block_size} tokens")
        return joined(sides, tuple(dict.fromkeys(note for side in sides for note in side.notes)))

    def training_texts(self, document: Mapping[str, Any]) -> list[str]:
        prompt, answers = self.prompt_and_answers(document)
        if isinstance(prompt, str):
            return [text for answer in answers for text in (prompt, answer)]
        said = [message.get("content") for answer in answers for message in [*prompt, *answer]]
        return [text for text in said if isinstance(text, str)]

    def train(self, documents: list[dict[str, Any]], vocab_size: int) -> PreTrainedTokenizerBase:
        if all(isinstance(self.prompt_and_answers(document)[0], str) for document in documents):
            return super().train(documents, vocab_size)
        texts = [{"messages": [{"role": "user", "content": t}]} for d in documents for t in self.training_texts(d)]
        return self.conversations.train(texts, vocab_size)

    def prompt_and_answers(self, record: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        """Return the prompt and the answers: two, the chosen one first, or a single one. All are texts, or lists of
        messages, of which those of the prompt are in the prompt alone."""
        prompt, answers = record.get(self._names[0]), [record[name] for name in self._answers(record)]
        if all(isinstance(answer, list) and answer for answer in answers):
            begin = _common_messages(answers)
            if isinstance(prompt, list) and prompt:
                begin = prompt if all(answer[: len(prompt)] == prompt for answer in answers) else []
            elif begin or not isinstance(prompt, str):
                prompt = begin
            else:
                prompt = [{"role": "user", "content": prompt}]
            answers = [answer[len(begin) :] for answer in answers]
        if prompt in (None, []) or len({type(part) for part in (prompt, *answers)}) > 1:
            raise UserError(
                "a prompt and its answers must be texts, or lists of messages that begin with the same ones; got "
                f"{str([prompt, *answers])[:200]}"
            )
        return prompt, answers

    def _answers(self, columns: Iterable[str]) -> list[str]:
        """Return the columns of the answers."""
        prompt, completion = self._names
        if {self.chosen, self.rejected} <= {*columns}:
            return [self.chosen, self.rejected]
        if {prompt, completion, self.label} <= {*columns}:
            return [completion]
        names = f"{self.chosen} and {self.rejected}, or {prompt}, {completion} and {self.label}"
        options = "data.prompt, data.chosen and data.rejected, or data.completion and data.label"
        raise unknown_form(f"preferences ({names})", columns, options)


def _common_messages(answers: list[Any]) -> list[Any]:
    """Return the messages with which all answers begin, up to the last one of a user or of what tools answer."""
    turns = zip(*(answer[:-1] for answer in answers), strict=False)
    common = [turn[0] for turn in takewhile(lambda turn: turn[0] == turn[-1], turns)]
    while common and common[-1].get("role", common[-1].get("from")) in ("assistant", "gpt"):
        common.pop()
    return common
