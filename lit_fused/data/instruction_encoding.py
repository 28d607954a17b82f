"""Encode prompts with completions, for causal models: one document each, with loss on the completion and on its end.

Both are texts, or both lists of messages, which the chat template writes.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from lit_fused.data.chat_encoding import ChatEncoding
from lit_fused.data.chat_template import TemplatedEncoding
from lit_fused.data.conversations import check_border, read_messages, read_tools, unknown_form
from lit_fused.data.encoding import Encoded, LeftOut, context_and_answer, with_prompt
from lit_fused.errors import UserError, check_switches
from lit_fused.models.special_tokens import closing_tokens, one_of_each

# As the authors of Stanford's Alpaca wrote it: https://github.com/tatsu-lab/stanford_alpaca
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
_ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass
class InstructionEncoding(TemplatedEncoding):
    """Documents are prompts with completions; loss is on the completion and on the token that ends it.

    The prompt's tokens are ``tokenizer(prompt)``, special tokens included, as a model is given them; one that a text
    spells out stands in place of the one that would be added there. The completion's are those that follow in the
    encoding of both together. Where a token there would hold characters of both, the completion is encoded alone. If
    the tokenizer cannot do that without adding a space, the document is left out.

    Attributes:
        prompt: The prompt's column, taken as it is; or text with ``{column}`` in it, such as ``"Q: {question}\\nA:"``.
            None: ``prompt``, or Alpaca's ``instruction`` and ``input`` (which may be missing or empty), in its words.
        completion: The completion's column. None: ``completion``, of Alpaca ``output``.
        train_on_prompt: Loss is on the prompt as well.
        chat_template, template_kwargs: Of lists of messages.
    """

    prompt: str | None = None
    completion: str | None = None
    train_on_prompt: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_switches({"train_on_prompt": bool}, {"train_on_prompt": self.train_on_prompt})

    @property
    def conversations(self) -> ChatEncoding:
        """Return how lists of messages are encoded."""
        return ChatEncoding(chat_template=self.chat_template, template_kwargs=self.template_kwargs)

    @property
    def _names(self) -> tuple[str, str]:
        return self.prompt or "prompt", self.completion or "completion"

    def training_texts(self, document: Mapping[str, Any]) -> list[str]:
        return ["".join(part) for part in [self.prompt_and_completion(document)] if isinstance(part[0], str)]

    def prompt_and_completion(self, record: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the prompt and the completion of a record: two texts, or two lists of messages."""
        prompt, completion = self._of(record)
        if prompt == _ALPACA_INPUT and not record.get("input"):
            prompt = _ALPACA
        names = [*_FIELD.findall(prompt), completion]
        if all(isinstance(record[name], str) for name in names):
            return _FIELD.sub(lambda match: record[match[1]], prompt), record[completion]
        if prompt == f"{{{names[0]}}}" and all(isinstance(record[name], list) for name in names):
            return record[names[0]], record[completion]
        shown = ", ".join(f"{name}: {str(record[name])[:40]!r}" for name in names)
        raise UserError(f"prompt and completion must be texts, or lists of messages; got {shown}")

    def _of(self, columns: Iterable[str]) -> tuple[str, str]:
        """Return the prompt as text with ``{column}`` in it, and the completion's column."""
        prompt, completion = self._names
        prompt = prompt if _FIELD.search(prompt) else f"{{{prompt}}}"
        if self.prompt is None and "prompt" not in columns and "instruction" in columns:
            prompt, completion = _ALPACA_INPUT, self.completion or "output"
        if missing := {*_FIELD.findall(prompt), completion} - {*columns, "input"}:
            hint = "data.prompt (a column, or text with {column} in it) and data.completion, or data=chat for messages"
            raise unknown_form(f"prompts with completions (no {', no '.join(sorted(missing))})", columns, hint)
        return prompt, completion

    def prepare(self) -> None:
        self._chats: Any = None  # a ChatEncoder, once there is a conversation
        self._closing = closing_tokens(self.tokenizer)
        if self.chat_template is not None:  # It may add tokens, which have to be known before any is stored.
            self._chats = self.conversations.encoder(self.tokenizer, sys.maxsize)

    def encode(self, document: Mapping[str, Any]) -> Encoded:
        found = self.answer(*self.prompt_and_completion(document), read_tools(document))
        fitted = self.fit_block(found, self.block_size)
        return with_prompt(fitted) if self.train_on_prompt else fitted

    def answer(self, prompt: Any, answer: Any, tools: list[Any] | None = None) -> Encoded:
        """Return the document of a prompt and an answer, of any length. LeftOut: there is nothing to learn."""
        if not isinstance(prompt, str):
            return self._conversation(prompt, answer, tools)
        if not answer.strip():
            raise LeftOut("the completion is empty")
        prompt_tokens, whole = (
            one_of_each(tokens[: len(tokens) - self._closing], self.tokenizer)
            for tokens in self.tokenize([prompt, prompt + answer])["input_ids"]
        )
        answer_tokens = whole[len(prompt_tokens) :]
        if whole[: len(prompt_tokens)] != prompt_tokens:
            (answer_tokens,) = self.tokenize([answer], add_special_tokens=False)["input_ids"]
            check_border(self.tokenizer, prompt, answer, prompt_tokens + answer_tokens, whole)
        end = self.end_of_text("which ends every completion")  # The completion may end with it already.
        return context_and_answer(prompt_tokens, one_of_each([*answer_tokens, end], self.tokenizer))

    def _conversation(self, prompt: list[Any], answer: list[Any], tools: list[Any] | None) -> Encoded:
        self._chats = self._chats or self.conversations.encoder(self.tokenizer, sys.maxsize)
        found: Encoded = self._chats.conversation(read_messages([*prompt, *answer]), tools, first=len(prompt))
        begin = (0, *(found.ends or (0,)))[-2]  # Of several documents, the last one has the answer's last turn.
        return Encoded(found.tokens[begin:], cast(Any, found.loss_mask)[begin:], found.notes)
