"""Read conversations, write them as text, and find which of the tokens the assistant says.

The tokenizer's chat template writes a conversation as text; this module finds the characters of the assistant's answers
in it and, through the tokenizer's offsets, their tokens. An answer's characters are those by which the conversation
that ends with it is longer than the prompt for it (``add_generation_prompt=True``), so that any template works. A
template that marks its answers itself (``{% generation %}``) is rendered with a character that no text has for each
mark. Transformers' own mask is not used: it loses the last bytes of an answer that ends with a character of several
tokens, misplaces marks in a macro, and wants too much where offsets are trimmed (Llama 3).

A template that writes an earlier answer otherwise than a last one (Qwen 3 drops its thoughts) makes several documents
of a conversation: each up to one answer, as the model sees it; an answer is wanted in one of them.
"""

import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from lit_fused.data.chat_forms import LostError, Message, forms, has_calls, marked, openai_message, refuse_lost
from lit_fused.errors import UserError

Flags = npt.NDArray[np.bool_]  # of tokens, (n,)
Span = tuple[int, int]  # of characters, the end exclusive
Rendered = tuple[str, list[Span]]  # a conversation, and its answers in it

# Needs no more of a tokenizer than the two tokens. Without marks: each prompt has the tokens that a model is given.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
MESSAGES_COLUMNS = ("messages", "conversations")

# ShareGPT-like files name the speakers so.
_ROLES = {"human": "user", "observation": "tool", "function_response": "tool"}
_ROLES |= dict.fromkeys(("gpt", "chatgpt", "model", "bot", "function_call"), "assistant")

_BEGIN, _END = "\ufdd0", "\ufdd1"  # noncharacters of Unicode, which are in no text
_LOST_MARKS = (
    "the chat template's {% generation %} marks cannot be followed: it takes white space, or parts, away from what "
    "they stand around; set data.chat_template to a file whose marks stand around what it writes"
)
_MARK = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


@dataclass(frozen=True)
class RenderedDocument:
    """The text of one document."""

    text: str  # ends with an answer
    wanted: list[Span]  # the characters on which loss is wanted: ordered, without overlap
    follows_prompts: bool  # each span begins where a prompt ends; False: the template marks its answers
    stops: bool  # a token ends the last answer


class ConversationRenderer:
    """Render conversations with the tokenizer's chat template, and say which characters are the assistant's."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None) -> None:
        if tokenizer.chat_template is None:
            raise UserError(
                "the tokenizer has no chat template; set data.chat_template to a file with one (Jinja), or to chatml, "
                f"which adds the tokens {' and '.join(CHATML_TOKENS)} where they are not in it yet"
            )
        self.tokenizer = tokenizer
        self._options = {**tokenizer.special_tokens_map, **(template_kwargs or {})}
        # Some tokenizers add line breaks (Gemma): those are text.
        added = [token for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
        self._added_tokens = tuple(token.content for token in added)
        self._control_tokens = sorted({token.content for token in added if token.special}, key=len, reverse=True)

    def documents(self, messages: list[Message], tools: list[Any] | None = None) -> list[RenderedDocument]:
        """Return the documents of one conversation: one, unless the template writes earlier answers otherwise.

        There is none if no message of the assistant says anything. What follows the last answer is left out.
        ``UserError`` says what the template refuses, or why the answers cannot be told from the rest.
        """
        for number, message in enumerate(messages, start=1):
            for token in (token for text in _strings(message) for token in self._control_tokens if token in text):
                raise UserError(
                    f"message {number} ({message['role']}) spells out the special token {token}, which would be "
                    "encoded as that token; take it out"
                )
        template, errors = self.tokenizer.get_chat_template(tools=tools), list[UserError]()
        for form in forms(messages):
            try:
                return self._documents(template, form, tools)
            except UserError as error:
                errors.append(error)
        lost = [error for error in errors if isinstance(error, LostError)]
        raise lost[0] if lost and has_calls(messages) else errors[0]

    def _documents(self, template: str, messages: list[Message], tools: list[Any] | None) -> list[RenderedDocument]:
        # Tags that write a character take the place of marks, with the same white space taken away around them.
        marked = _MARK.sub(lambda m: f"{{%{m[1]} if true %}}{_END if m[2] else _BEGIN}{{% endif {m[3]}%}}", template)
        find = self._answer if marked == template else self._marked_answer
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and says(message)]
        # The text that ends with each answer, and the answer's spans in it.
        rendered = {i: find(marked, messages, i, tools) for i in answers}
        documents: list[RenderedDocument] = []
        while rendered:
            last = max(rendered)
            text, _ = rendered[last]
            if marked != template and text != self._fill(template, messages[: last + 1], tools):
                raise UserError(_LOST_MARKS)
            _refuse_lost_content(text, messages[: last + 1])
            self._refuse_lost_tools(template, messages[: last + 1], tools)
            inside = [i for i in rendered if text.startswith(rendered[i][0])]
            spans = [span for i in inside for span in rendered.pop(i)[1]]
            stops = text[: spans[-1][1]].endswith(self._added_tokens)
            documents.append(RenderedDocument(text, spans, marked == template, stops))
        return documents[::-1]

    def _answer(self, template: str, messages: list[Message], i: int, tools: list[Any] | None) -> Rendered:
        """Return the conversation up to and including the answer ``i``, and where that stands in it."""
        text = self._fill(template, messages[: i + 1], tools)
        prompt = self._fill(template, messages[:i], tools, add_generation_prompt=True)
        if not text.startswith(prompt):
            raise UserError(
                f"the chat template does not write the answer in message {i + 1} as a continuation of its prompt "
                f"({prompt[-40:]!r} is the prompt's end, {text[-40:]!r} the answer's), so loss on the answer "
                "alone is not defined; give the template what it lacks (reasoning_content in the answers, or "
                "data.template_kwargs='{enable_thinking: false}'), or set data.chat_template to a file whose template "
                "does, or marks its answers with {% generation %}"
            )
        # The turn ends behind its last token, and before a line break of the template.
        stripped = text.rstrip()
        end = len(stripped) if stripped.endswith(self._added_tokens) else len(text)
        if end <= len(prompt):
            raise UserError(f"the chat template writes nothing of the answer in message {i + 1}")
        return text, [(len(prompt), end)]

    def _marked_answer(self, template: str, messages: list[Message], i: int, tools: list[Any] | None) -> Rendered:
        """Do the same with a template whose marks are visible: the answer's are those that it adds."""
        text, spans = _without_marks(self._fill(template, messages[: i + 1], tools))
        _, earlier = _without_marks(self._fill(template, messages[:i], tools) if i else "")
        own = spans[len(earlier) :]
        if not own:
            raise UserError(f"the chat template marks nothing of the answer in message {i + 1} with {{% generation %}}")
        begin, end = own[-1]
        # The special token behind what a template marks ends the turn, and is learned.
        end += len(next((token for token in self._control_tokens if text.startswith(token, end)), ""))
        return text, [*own[:-1], (begin, end)]

    def _refuse_lost_tools(self, template: str, messages: list[Message], tools: list[Any] | None) -> None:
        calls, (copies, marks) = has_calls(messages), marked(messages)
        try:
            is_lost = tools and self._fill(template, messages, tools) == self._fill(template, messages, None)
            text = self._fill(template, copies, None) if calls else ""
        except UserError:  # a template may refuse marks, and calls of tools that are not offered
            return
        if is_lost:
            raise LostError(
                "the chat template leaves out the tools that the record offers; set data.chat_template to a file whose "
                "template writes tools, or leave them out of the records"
            )
        if calls:
            refuse_lost(text, marks)

    def _fill(
        self, template: str, messages: list[Message], tools: list[Any] | None, *, add_generation_prompt: bool = False
    ) -> str:
        try:
            options = {"add_generation_prompt": add_generation_prompt, **self._options}
            (text,), _ = render_jinja_template([messages], tools=tools, chat_template=template, **options)
        except Exception as error:  # a template is a program: it raises what it likes
            roles = ", ".join(str(message["role"]) for message in messages) or "none, as it begins with the assistant"
            raise UserError(f"the chat template refuses the conversation (roles: {roles}): {error}") from error
        return text


def wanted_tokens(offsets: Sequence[Span], spans: Sequence[Span], fixed: Flags) -> Flags:
    """Return which tokens (n,) have a character in one of the ordered ``spans``.

    ``offsets`` are the characters of each token. A character of several tokens wants them all. A token that holds the
    end of the prompt and the beginning of an answer is the answer's, unless it is a ``fixed`` one (n,): an added token,
    which may swallow white space around it.
    """
    begins, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    # A tokenizer that trims its offsets gives a token of white space none of its characters: those since the last one.
    reached = np.maximum.accumulate(np.concatenate([[0], ends[:-1]])) if len(ends) else ends
    begins = np.where(begins == ends, np.minimum(begins, reached), begins)
    wanted = np.zeros(len(begins), dtype=bool)
    for begin, end in spans:
        wanted |= (begins < end) & (ends > begin) & ~(fixed & (begins < begin))
    return wanted


def _without_marks(marked: str) -> Rendered:
    pieces = re.split(f"({_BEGIN}|{_END})", marked)
    if pieces[1::2] != [_BEGIN, _END] * (len(pieces) // 4):
        raise UserError(_LOST_MARKS)
    borders = list(accumulate(map(len, pieces[::2])))
    return "".join(pieces[::2]), list(zip(borders[:-1:2], borders[1::2], strict=False))


def _refuse_lost_content(text: str, messages: list[Message]) -> None:
    """Refuse a template that passes over content, or writes parts as Python shows them; thoughts it may leave out."""
    for number, message in enumerate(messages, start=1):
        if message["role"] in ("user", "assistant") and not message.get("tool_calls"):
            content = message["content"] or ""
            said = (content if isinstance(content, str) else content[0]["text"]).split("</think>")[-1].strip()
            if said not in text or (content and str(content) in text and not isinstance(content, str)):
                raise LostError(
                    f"the chat template leaves out what message {number} ({message['role']}) says, or changes it; "
                    "set data.chat_template to a file whose template takes text"
                )


def says(message: Mapping[str, Any]) -> bool:
    """Return whether there is anything to learn in a message of the assistant."""
    if message.get("weight") == 0:
        return False
    values = [message.get(key) for key in ("content", "tool_calls", "reasoning_content", "thinking")]
    return any(value.strip() if isinstance(value, str) else value for value in values)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(inner)


def read_conversation(record: dict[str, Any], messages_column: str | None = None) -> tuple[list[Message], list | None]:
    """Return the messages and the tools (or None) of a record.

    A message is {"role", "content"} and whatever else the template reads, or ShareGPT's {"from", "value"}. Its content
    is text, parts of text, or null beside tool calls. With "weight": 0, as OpenAI's files have it, an answer is not to
    be learned. Tools are a list, or JSON. Null counts as absent, because Arrow fills with nulls whatever one message
    has and another lacks.
    """
    names = (messages_column,) if messages_column else MESSAGES_COLUMNS
    column = next((name for name in names if name in record), None)
    if column is None:
        raise UserError(
            f"a conversation needs a column {' or '.join(names)}, but this record has "
            f"{', '.join(map(str, record)) or 'none'}; set data.messages_column to the one that holds the messages"
        )
    record = without_none(record)
    messages = record.get(column)
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{column} must be a list of messages, one at least; got {_shown(messages)}")
    tools = _tools(record.get("tools"))
    if tools is None and (functions := _tools(record.get("functions"))):  # OpenAI's older name
        tools = [{"type": "function", "function": function} for function in functions]
    return [_message(message, number) for number, message in enumerate(messages, start=1)], tools


def without_none(value: Any) -> Any:
    """Return ``value`` without the entries, at any depth, that are None."""
    if isinstance(value, dict):
        return {key: without_none(inner) for key, inner in value.items() if inner is not None}
    return [without_none(inner) for inner in value] if isinstance(value, list) else value


def _message(message: Any, number: int) -> Message:
    if not isinstance(message, dict):
        raise UserError(f'message {number} must be {{"role": ..., "content": ...}}; got {_shown(message)}')
    if "role" not in message and "from" in message:
        rest = {key: value for key, value in message.items() if key not in ("from", "value")}
        role = message["from"]
        message = {"role": _ROLES.get(role, role), "content": message.get("value"), **rest}
    message = openai_message(message, number)
    role, content = message.get("role"), message.setdefault("content", None)
    if not isinstance(role, str):
        raise UserError(f"message {number} has no role; got {_shown(message)}")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise UserError(
            f"the content of message {number} ({role}) must be a string, or a list of parts of text; got "
            f"{_shown(content)}"
        )
    if message.get("weight") not in (None, 0, 1):
        raise UserError(f"the weight of message {number} ({role}) must be 0 or 1; got {_shown(message['weight'])}")
    return message


def _tools(tools: Any) -> list | None:
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise UserError(f"tools must be a list, or JSON of one; it cannot be read as JSON: {error}") from error
    if tools and not isinstance(tools, list):
        raise UserError(f"tools must be a list, or JSON of one; got {_shown(tools)}")
    return tools or None


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {reprlib.repr(value)}"
