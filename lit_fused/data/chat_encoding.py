"""Encode conversations: the text that the chat template makes of them, with loss on the assistant's tokens only.

An answer's characters are those by which the conversation that ends with it is longer than the prompt for it
(``add_generation_prompt=True``), so any template works; where a template marks its answers (``{% generation %}``),
they are the ones that transformers reports. The tokenizer's offsets say which tokens have these characters.

A template that writes an earlier answer otherwise than a last one (Qwen 3 drops its thoughts) makes several documents
of a conversation: each up to one answer, as the model sees it when it gives that answer.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from lit_fused.data.chat_template import CHATML, CHATML_TOKENS, TemplatedEncoding, with_chat_template
from lit_fused.data.conversations import Message, check_border, read_conversation, says, weight_of
from lit_fused.data.encoding import Encoded, LeftOut, as_mask, joined
from lit_fused.data.tokenizer import MIN_VOCAB_SIZE
from lit_fused.errors import check_switches

Flags = npt.NDArray[np.bool_]  # of tokens, (n,)
Span = tuple[int, int]  # of characters, the end exclusive
Answer = tuple[int, int, float]  # an answer's characters, and the weight of its loss
_WRITES_ALL = "set data.chat_template to chatml, which writes all, or to a file"
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers finds them


@dataclass
class ChatEncoding(TemplatedEncoding):
    """Documents are conversations, with loss on what the assistant says.

    A record is ``{"messages": [{"role", "content"}, ...]}``, perhaps with ``"tools"``, or ShareGPT's
    ``{"conversations": [{"from", "value"}, ...]}``.

    An answer's ``"weight"`` is a factor on its loss; one of weight 0 is context.

    Their tokens are those of ``tokenizer.apply_chat_template``. What the assistant says includes the token that ends
    its turn. Messages without anything to learn (empty answers) are context. What follows the last answer is left out.
    UserError: the tokenizer has no chat template.

    Attributes:
        messages_column: The column of the messages where it has another name.
        train_on_prompt: Loss is on all tokens but those of answers of weight 0.
        chat_template, template_kwargs: See :class:`lit_fused.data.chat_template.TemplatedEncoding`. A tokenizer that is
            trained on the conversations has ChatML.
    """

    min_vocab_size = MIN_VOCAB_SIZE + len(CHATML_TOKENS)

    messages_column: str | None = None
    train_on_prompt: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_switches({"train_on_prompt": bool}, {"train_on_prompt": self.train_on_prompt})

    def training_texts(self, document: Mapping[str, Any]) -> list[str]:
        messages, _ = read_conversation(document, self.messages_column)
        return [message["content"] for message in messages if message["content"]]

    def train(self, documents: list[dict[str, Any]], vocab_size: int) -> PreTrainedTokenizerBase:
        tokenizer = super().train(documents, vocab_size - len(CHATML_TOKENS))
        tokenizer.add_special_tokens({"extra_special_tokens": [CHATML_TOKENS[0]], "eos_token": CHATML_TOKENS[1]})
        tokenizer.chat_template = str(self.chat_template or CHATML)
        return tokenizer

    def prepare(self) -> None:
        tokenizer = with_chat_template(self.tokenizer, cast(str | None, self.chat_template))
        self._options = {**tokenizer.special_tokens_map, **(self.template_kwargs or {})}
        added = tokenizer.added_tokens_decoder
        self._added = np.array(sorted(added), dtype=np.int64)
        # Some tokenizers add line breaks (Gemma): those are text.
        self._ends = tuple(token.content for token in added.values() if token.content.strip())
        self._special = [token.content for token in added.values() if token.special and token.content.strip()]

    def encode(self, document: Mapping[str, Any]) -> Encoded:
        return self.conversation(*read_conversation(document, self.messages_column))

    def conversation(self, messages: list[Message], tools: list[Any] | None = None, first: int = 0) -> Encoded:
        """Return the documents of a conversation with loss on the answers from message ``first`` on. LeftOut: it has
        none, or the template does not write it so that they can be told from the rest."""
        answers = [i for i in range(first, len(messages)) if says(messages[i])]
        weights = {i: weight_of(messages[i]) for i in answers}
        if not self.train_on_prompt:
            answers = [i for i in answers if weights[i] > 0]
        if not answers:
            raise LeftOut("the assistant says nothing")
        self._refuse_special_tokens(messages, tools)
        template = self.tokenizer.get_chat_template(tools=tools)
        render = self._marked_answer if _MARKS.search(template) else self._answer
        rendered: dict[int, tuple[str, list[Answer]]] = {}
        for i in answers:
            text, spans = render(template, messages[: i + 1], tools)
            rendered[i] = text, [(*span, weights[i]) for span in spans]
        parts, notes = list[Encoded](), list[str]()
        for number, (last, text, spans) in enumerate(_documents(rendered)):
            _refuse_lost(text, messages[: last + 1])
            if tools and text == self._fill(template, messages[: last + 1], None)[0]:
                raise LeftOut(f"the chat template leaves out the tools; {_WRITES_ALL}")
            if number:
                notes.append("divided: the chat template rewrites earlier answers")
            if not text[: spans[-1][1]].endswith(self._ends):
                notes.append("no token ends the answers: a model does not learn to stop")
            tokens = self._tokens(text)
            if render == self._marked_answer or all(self._follows_prompt(text, begin, tokens) for begin, *_ in spans):
                fixed = np.isin(tokens[0], self._added)
                parts.append(Encoded(tokens[0], wanted_tokens(tokens[1], spans, fixed, float(self.train_on_prompt))))
            else:
                notes.append("divided: prompts are encoded otherwise with an answer behind them")
                parts += [self._prompt_and_answer(text, *span) for span in spans]
        fitted = [self.fit_block(part, self.block_size) for part in parts]
        return joined(fitted, tuple(dict.fromkeys([*notes, *(note for part in fitted for note in part.notes)])))

    # --- text ---

    def _answer(self, template: str, messages: list[Message], tools: list[Any] | None) -> tuple[str, list[Span]]:
        """Return the text of the messages, and the characters of the last of them, the answer."""
        text, _ = self._fill(template, messages, tools)
        prompt, _ = self._fill(template, messages[:-1], tools, add_generation_prompt=True)
        if not text.startswith(prompt):
            raise LeftOut(
                "the chat template does not write an answer behind its prompt; give it what it lacks "
                "(reasoning_content, data.template_kwargs='{enable_thinking: false}') or set data.chat_template"
            )
        # The turn ends behind its last token, and before a line break of the template.
        stripped = text.rstrip()
        end = len(stripped) if stripped.endswith(self._ends) else len(text)
        if end <= len(prompt):
            raise LeftOut("the chat template writes nothing of an answer")
        _refuse_lost(text[len(prompt) : end], messages[-1:])
        return text, [(len(prompt), end)]

    def _marked_answer(self, template: str, messages: list[Message], tools: list[Any] | None) -> tuple[str, list[Span]]:
        """Do the same by the template's marks. The special token behind them ends the turn, and is learned."""
        text, spans = self._fill(template, messages, tools)
        earlier = self._fill(template, messages[:-1], tools)[1] if len(messages) > 1 else []
        if len(spans) <= len(earlier):
            raise LeftOut("the chat template marks nothing of an answer with {% generation %}")
        *spans, (begin, end) = spans[len(earlier) :]
        behind = next((token for token in self._special if text.startswith(token, end)), "")
        return text, [*spans, (begin, end + len(behind))]

    def _fill(
        self, template: str, messages: list[Message], tools: list[Any] | None, *, add_generation_prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """Return what the template writes, and the characters that it marks. The template runs in a sandbox."""
        options = {"return_assistant_tokens_mask": bool(_MARKS.search(template)), **self._options}
        options |= {"chat_template": template, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            (text,), spans = cast(Any, render_jinja_template)([messages], **options)
        except Exception as error:  # A template is a program: it raises what it likes.
            raise LeftOut(f"the chat template refuses it: {str(error)[:100]}") from error
        return str(text), spans[0] if spans else []

    def _refuse_special_tokens(self, messages: list[Message], tools: list[Any] | None) -> None:
        said = json.dumps([messages, tools], ensure_ascii=False, default=str)
        for token in (token for token in self._special if token in said):
            raise LeftOut(f"a message spells out the special token {token}, which would be encoded as that token")

    # --- tokens ---

    def _tokens(self, text: str) -> tuple[npt.NDArray[np.int64], list[Span]]:
        """Return the tokens of a text, (n,), and the characters of each."""
        encoded = self.tokenize([text], add_special_tokens=False, return_offsets_mapping=True)
        return np.asarray(encoded["input_ids"][0], dtype=np.int64), encoded["offset_mapping"][0]

    def _follows_prompt(self, text: str, begin: int, tokens: tuple[npt.NDArray[np.int64], list[Span]]) -> bool:
        """Return whether the prompt has the tokens that a model is given. Added tokens divide a text: what precedes the
        last of them is encoded alike whatever follows."""
        ids, begins = tokens[0], np.array([span[0] for span in tokens[1]])
        before = np.flatnonzero(np.isin(ids, self._added) & (begins < begin))
        start = int(before[-1]) if len(before) else 0
        tail, _ = self._tokens(text[begins[start] if start else 0 : begin])
        return np.array_equal(ids[start : start + len(tail)], tail)

    def _prompt_and_answer(self, text: str, begin: int, end: int, weight: float) -> Encoded:
        """Encode the prompt as a model is given it, and the answer alone."""
        prompt, answer, whole = (self._tokens(part)[0].tolist() for part in (text[:begin], text[begin:end], text[:end]))
        check_border(self.tokenizer, text[:begin], text[begin:end], prompt + answer, whole)
        weights = np.repeat(np.array([self.train_on_prompt, weight], np.float32), [len(prompt), len(answer)])
        return Encoded(np.array([*prompt, *answer], dtype=np.int64), as_mask(weights))


def _documents(rendered: Mapping[int, tuple[str, list[Answer]]]) -> Iterator[tuple[int, str, list[Answer]]]:
    """Yield the documents that hold all answers: the number of the last message, the text, and the answers."""
    left, found = dict(rendered), []
    while left:
        last = max(left)
        text = left[last][0]
        inside = [i for i in left if text.startswith(left[i][0])]
        found.append((last, text, [span for i in inside for span in left.pop(i)[1]]))
    return reversed(found)


def wanted_tokens(
    offsets: Sequence[Span], answers: Sequence[Answer], fixed: Flags, of_others: float = 0.0
) -> npt.NDArray[Any]:
    """Return the weight of each token (n,): that of the answer of which it has a character, else ``of_others``; bool
    where all are 0 or 1. The answers are in their order.

    ``offsets`` are the characters of each token. A character of several tokens is of them all. A token that holds the
    end of the prompt and the beginning of an answer is the answer's, unless it is a ``fixed`` one (n,): an added token,
    which may swallow white space around it.
    """
    begins, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    # A tokenizer that trims its offsets gives a token of white space none of its characters: those since the last one.
    reached = np.maximum.accumulate(np.concatenate([[0], ends[:-1]])) if len(ends) else ends
    begins = np.where(begins == ends, np.minimum(begins, reached), begins)
    weights = np.full(len(begins), of_others, dtype=np.float32)
    for begin, end, weight in answers:
        weights[(begins < end) & (ends > begin) & ~(fixed & (begins < begin))] = weight
    return as_mask(weights)


def _refuse_lost(text: str, messages: list[Message]) -> None:
    """Refuse a text without something that is said or called in the messages; thoughts may be left out."""
    said = [message["content"].rpartition("</think>")[2].strip() for message in messages]
    called = [call["function"]["name"] for message in messages for call in message.get("tool_calls", ())]
    for what, parts in (("a message", said), ("a tool call", called)):
        if any(part not in text and json.dumps(part, ensure_ascii=False)[1:-1] not in text for part in parts):
            raise LeftOut(f"the chat template leaves out {what}; {_WRITES_ALL}")
