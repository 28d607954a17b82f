"""Conversations into tokens, and which of the tokens the assistant says.

The tokenizer's chat template writes a conversation as text; this module finds the characters of the assistant's answers
in it and, through the tokenizer's offsets, their tokens. The one trick: an answer's characters are those by which the
conversation that ends with it is longer than the prompt for it (``add_generation_prompt=True``), so that any template
works, and the prompt is checked to be what a model is given when it answers. A template that marks its answers itself
(``{% generation %}``) is taken at its word: it is rendered once more, with a character that no text has for each mark.
Transformers' own mask is not used: it loses the last bytes of an answer that ends with a character of several tokens,
misplaces marks inside a macro, and, where the tokenizer trims its offsets (Llama 3's), an answer that ends with a space
makes everything after it wanted.

A template that writes an earlier answer otherwise than a last one (Qwen 3 drops its thoughts) cannot show all answers
in one text as they were given. Such a conversation becomes several documents: each is a conversation up to one answer,
as the model sees it, and holds every earlier answer that stands in it unchanged; an answer is wanted in one of them.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from lit_fused.errors import UserError

Message = dict[str, Any]
Span = tuple[int, int]  # of characters, the end exclusive

# Needs no more of a tokenizer than the two tokens. Without marks: each prompt has the tokens that a model is given.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")

_BEGIN, _END = "\ufdd0", "\ufdd1"  # noncharacters of Unicode, which are in no text
_LOST_MARKS = (
    "the chat template's {% generation %} marks cannot be followed: it takes white space, or parts, away from what "
    "they stand around; set data.chat_template to a file whose marks stand around what it writes"
)
_MARK = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


@dataclass(frozen=True)
class RenderedDocument:
    """The text of one document.

    Attributes:
        text: It ends with an answer.
        wanted: The characters on which loss is wanted: ordered spans that do not overlap.
        follows_prompts: Each span begins where a prompt ends: they are not the template's own marks.
        stops: A token ends the last answer.
    """

    text: str
    wanted: list[Span]
    follows_prompts: bool
    stops: bool


class ConversationRenderer:
    """Renders conversations with the tokenizer's chat template; says which characters are the assistant's.

    Args:
        tokenizer: With a chat template.
        template_kwargs: What else the template reads, such as ``enable_thinking``.

    Raises:
        UserError: The tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None) -> None:
        if tokenizer.chat_template is None:
            raise UserError(
                "the tokenizer has no chat template; set data.chat_template to a file with one (Jinja), or to chatml, "
                f"which adds the tokens {' and '.join(CHATML_TOKENS)} where they are not in it yet"
            )
        self.tokenizer = tokenizer
        self.template_kwargs = {**tokenizer.special_tokens_map, **(template_kwargs or {})}
        # Some tokenizers add line breaks (Gemma): those are text.
        added = [token for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
        self._added_tokens = {token.content for token in added}
        self._control_tokens = sorted({token.content for token in added if token.special}, key=len, reverse=True)

    def documents(self, messages: list[Message], tools: list[Any] | None = None) -> list[RenderedDocument]:
        """The documents of one conversation: one, unless the template writes earlier answers otherwise than the last.

        An empty list if no message of the assistant says anything. What follows the last answer is left out.

        Raises:
            UserError: The template refuses the conversation, or a message spells out a special token, or the answers
                cannot be told from the rest.
        """
        self._refuse_control_tokens(messages)
        template = self.tokenizer.get_chat_template(tools=tools)
        marked = _MARK.sub(_visible, template)
        find = self._answer if marked == template else self._marked_answer
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and _says(message)]
        # The text that ends with each answer, and the answer's spans in it.
        rendered = {i: find(marked, messages, i, tools) for i in answers}
        documents: list[RenderedDocument] = []
        while rendered:
            last = max(rendered)
            text, _ = rendered[last]
            if marked != template and text != self._fill(template, messages[: last + 1], tools):
                raise UserError(_LOST_MARKS)
            _refuse_lost_content(text, messages[: last + 1])
            inside = [i for i in rendered if text.startswith(rendered[i][0])]
            spans = [span for i in inside for span in rendered.pop(i)[1]]
            stops = any(text[: spans[-1][1]].endswith(token) for token in self._added_tokens)
            documents.append(RenderedDocument(text, spans, marked == template, stops))
        return documents[::-1]

    def _answer(
        self, template: str, messages: list[Message], i: int, tools: list[Any] | None
    ) -> tuple[str, list[Span]]:
        """The conversation up to and including the answer ``i``, and where that stands in it: behind its prompt."""
        text = self._fill(template, messages[: i + 1], tools)
        prompt = self._fill(template, messages[:i], tools, add_generation_prompt=True)
        if not text.startswith(prompt):
            raise UserError(
                f"the chat template does not write the answer in message {i + 1} as a continuation of its prompt "
                f"({_ending(prompt)} is the prompt's end, {_ending(text)} the answer's), so loss on the answer "
                "alone is not defined; give the template what it lacks (reasoning_content in the answers, or "
                "data.template_kwargs='{enable_thinking: false}'), or set data.chat_template to a file whose template "
                "does, or marks its answers with {% generation %}"
            )
        end = self._end_of_turn(text)
        if end <= len(prompt):
            raise UserError(f"the chat template writes nothing of the answer in message {i + 1}")
        return text, [(len(prompt), end)]

    def _marked_answer(
        self, template: str, messages: list[Message], i: int, tools: list[Any] | None
    ) -> tuple[str, list[Span]]:
        """The same with a template whose marks are visible: the answer's are those that it adds."""
        text, spans = _without_marks(self._fill(template, messages[: i + 1], tools))
        _, earlier = _without_marks(self._fill(template, messages[:i], tools) if i else "")
        own = spans[len(earlier) :]
        if not own:
            raise UserError(f"the chat template marks nothing of the answer in message {i + 1} with {{% generation %}}")
        begin, end = own[-1]
        own[-1] = (begin, end + len(self._token_at(text, end)))
        return text, own

    def _fill(
        self, template: str, messages: list[Message], tools: list[Any] | None, *, add_generation_prompt: bool = False
    ) -> str:
        try:
            (text,), _ = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                **self.template_kwargs,
            )
        except Exception as error:  # a template is a program: it raises what it likes
            if not messages:
                raise UserError(
                    "the conversation begins with the assistant, and the chat template cannot write a prompt without "
                    f"any message: {error}"
                ) from error
            roles = ", ".join(str(message["role"]) for message in messages)
            raise UserError(f"the chat template refuses the conversation (roles: {roles}): {error}") from error
        return text

    def _token_at(self, text: str, position: int) -> str:
        """Return the special token behind what a template marks: it ends the turn, and is learned."""
        return next((token for token in self._control_tokens if text.startswith(token, position)), "")

    def _end_of_turn(self, text: str) -> int:
        """Return the end of the last turn, behind its last token and before a line break of the template."""
        stripped = text.rstrip()
        return len(stripped) if any(stripped.endswith(token) for token in self._added_tokens) else len(text)

    def _refuse_control_tokens(self, messages: list[Message]) -> None:
        for number, message in enumerate(messages, start=1):
            for string in _strings(message):
                token = next((token for token in self._control_tokens if token in string), None)
                if token is not None:
                    raise UserError(
                        f"message {number} ({message['role']}) spells out the special token {token}, which would be "
                        "encoded as that token; take it out"
                    )


def wanted_tokens(
    offsets: Sequence[Span], spans: Sequence[Span], fixed: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """The tokens (n,) with a character in one of ``spans``.

    A character of several tokens wants them all. A token that holds the end of the prompt and the beginning of an
    answer is the answer's, unless it is a ``fixed`` token (an added one, which may swallow white space around it).

    Args:
        offsets: The characters (begin, end) of each token, n of them.
        spans: Ordered, without overlap.
        fixed: (n,), the tokens that are not made of text.
    """
    begins, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    # A tokenizer that trims its offsets gives a token of white space none of its characters: those since the last one.
    reached = np.maximum.accumulate(np.concatenate([[0], ends[:-1]])) if len(ends) else ends
    begins = np.where(begins == ends, np.minimum(begins, reached), begins)
    wanted = np.zeros(len(begins), dtype=bool)
    for begin, end in spans:
        wanted |= (begins < end) & (ends > begin) & ~(fixed & (begins < begin))
    return wanted


def _visible(mark: re.Match[str]) -> str:
    """A mark's tag as tags that write a character, with the same white space taken away around them."""
    return f"{{%{mark[1]} if true %}}{_END if mark[2] else _BEGIN}{{% endif {mark[3]}%}}"


def _without_marks(marked: str) -> tuple[str, list[Span]]:
    """The text, and where the marks stand in it."""
    pieces = re.split(f"({_BEGIN}|{_END})", marked)
    if pieces[1::2] != [_BEGIN, _END] * (len(pieces) // 4):
        raise UserError(_LOST_MARKS)
    borders = list(itertools.accumulate(map(len, pieces[::2])))
    return "".join(pieces[::2]), list(zip(borders[:-1:2], borders[1::2], strict=False))


def _refuse_lost_content(text: str, messages: list[Message]) -> None:
    """Some templates pass over content of a shape that they do not expect. Only thoughts and tools may be left out."""
    for number, message in enumerate(messages, start=1):
        if message["role"] in ("user", "assistant") and not message.get("tool_calls"):
            said = message.get("content", "").split("</think>")[-1].strip()
            if said not in text:
                raise UserError(
                    f"the chat template leaves out what message {number} ({message['role']}) says: it expects content "
                    "of another shape (a list of parts, as for images), or changes it; set data.chat_template to a "
                    "file whose template takes text"
                )


def _says(message: Message) -> bool:
    """Tell whether an assistant's message has anything to learn."""
    if message.get("weight") == 0:
        return False
    values = [message.get(key) for key in ("content", "tool_calls", "reasoning_content", "thinking")]
    return any(value.strip() if isinstance(value, str) else value for value in values)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _ending(text: str) -> str:
    return repr(text[-40:])
