"""Encode pairs of texts, with loss on the second: prompts with completions, and sources with targets.

Prompts and completions are for causal models; the two are one text. Sources and targets are for encoder-decoders. In
the store such a pair is one document, too: the first wanted token is the border, at which
:class:`lit_fused.data.packing.PairRows` divides it again.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lit_fused.data.encoding import Encoded, Encoder, RecordEncoding, context_and_answer, leave_out, no_column
from lit_fused.errors import UserError
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


class InstructionEncoder(Encoder["InstructionEncoding"]):
    """Encode the prompt as the tokenizer does it alone, then the completion, then the end-of-text token.

    The prompt's tokens are ``tokenizer(prompt)``, special tokens included, as a model is given them; one that a text
    spells out stands in place of the one that would be added there. The completion's
    are those that follow in the encoding of both together. Where a token there would hold characters of both, the
    completion is encoded alone. If the tokenizer cannot do that without adding a space, the document is bad.
    """

    def __post_init__(self) -> None:
        self._eos = self.end_of_text("which ends every completion")
        self._closing = closing_tokens(self.tokenizer)

    def __call__(self, documents: list[dict[str, Any]]) -> list[Encoded]:
        prompts, completions = zip(*map(self.encoding.texts, documents), strict=True)
        wholes = list(map("".join, zip(prompts, completions, strict=True)))
        return list(map(self._document, prompts, completions, self._encode(prompts), self._encode(wholes)))

    def _encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the tokens of each text, without an end-of-text token of the tokenizer's own."""
        encoded = self.tokenize(list(texts), add_special_tokens=add_special_tokens)["input_ids"]
        if not add_special_tokens:
            return encoded
        return [one_of_each(tokens[: len(tokens) - self._closing], self.tokenizer) for tokens in encoded]

    def _document(self, prompt: str, completion: str, prompt_tokens: list[int], whole: list[int]) -> Encoded:
        if not completion.strip():
            return leave_out("left out: the completion is empty")
        if whole[: len(prompt_tokens)] == prompt_tokens:
            answer = whole[len(prompt_tokens) :]
        else:
            (answer,) = self._encode([completion], add_special_tokens=False)
            self.check_border(prompt, completion, prompt_tokens + answer, whole)
        answer = one_of_each([*answer, self._eos], self.tokenizer)  # The completion may end with the token itself.
        return self.encoding.fit_block(context_and_answer(prompt_tokens, answer), self.block_size)


@dataclass(frozen=True)
class InstructionEncoding(RecordEncoding):
    """Documents are prompts with completions; loss is on the completion and on the token that ends it.

    Attributes:
        prompt: The prompt's column, taken as it is; or text with ``{column}`` in it, such as ``"Q: {question}\\nA:"``;
            or "alpaca": the columns ``instruction`` and ``input`` (which may be missing or empty) in Alpaca's words.
        completion: The completion's column, taken as it is. None: ``output`` for Alpaca, else ``completion``.
    """

    made_by = InstructionEncoder

    prompt: str = "prompt"
    completion: str | None = None

    @property
    def _completion(self) -> str:
        return self.completion or ("output" if self.prompt == "alpaca" else "completion")

    @property
    def columns(self) -> list[str]:
        if self.prompt == "alpaca":
            return ["instruction", "input", self._completion]
        return [*(_FIELD.findall(self.prompt) or [self.prompt]), self._completion]

    def training_texts(self, document: Mapping[str, Any]) -> list[str]:
        return ["".join(self.texts(document))]

    def texts(self, record: Mapping[str, Any]) -> tuple[str, str]:
        """Return the prompt and the completion."""
        read = partial(_text, record, options="data.prompt or data.completion")
        completion = read(self._completion)
        if self.prompt == "alpaca":
            template = _ALPACA_INPUT if record.get("input") else _ALPACA
        else:
            template = self.prompt if _FIELD.search(self.prompt) else f"{{{self.prompt}}}"
        return _FIELD.sub(lambda match: read(match[1]), template), completion


class PairEncoder(Encoder["PairEncoding"]):
    """Encode ``tokenizer(source)`` and ``tokenizer(text_target=target)``, with the tokenizer's own special tokens.

    A target ends with the end-of-text token also where the tokenizer does not append it, so that a model learns to
    stop. Special tokens that a text spells out are encoded as ordinary text. ``block_size`` holds for each of the two.
    """

    def __post_init__(self) -> None:
        eos = self.end_of_text("which ends every target")
        self._end = [] if eos in self.tokenizer(text_target="a")["input_ids"] else [eos]

    def __call__(self, documents: list[dict[str, Any]]) -> list[Encoded]:
        sources, targets = zip(*map(self.encoding.training_texts, documents), strict=True)
        return list(map(self._pair, sources, targets, self._tokens(sources), self._tokens(targets, is_target=True)))

    def _tokens(self, texts: Sequence[str], *, is_target: bool = False, cut: bool = False) -> list[list[int]]:
        end = self._end if is_target else []
        options = {"truncation": True, "max_length": self.block_size - len(end)} if cut else {}
        options["text_target" if is_target else "text"] = list(texts)
        encoded = self.tokenize(split_special_tokens=True, **options)["input_ids"]
        return [one_of_each([*tokens, *end], self.tokenizer) for tokens in encoded]

    def _pair(self, source: str, target: str, source_tokens: list[int], target_tokens: list[int]) -> Encoded:
        for text, role in ((source, "source"), (target, "target")):
            if not text.strip():
                return leave_out(f"left out: the {role} is empty")
        longest = max(len(source_tokens), len(target_tokens))
        if replacement := self.encoding.replacement(longest, self.block_size):
            return replacement
        if len(source_tokens) > self.block_size:
            (source_tokens,) = self._tokens([source], cut=True)
        if len(target_tokens) > self.block_size:
            (target_tokens,) = self._tokens([target], is_target=True, cut=True)
        notes = (f"cut to {self.block_size} tokens",) * (longest > self.block_size)
        return context_and_answer(source_tokens, target_tokens, notes)


@dataclass(frozen=True)
class PairEncoding(RecordEncoding):
    """Documents are pairs of texts: the encoder reads the source, and the decoder learns to say the target.

    Attributes:
        too_long: A pair whose source or target has more than ``block_size`` tokens is cut ("cut"; end tokens stay),
            left out ("skip") or refused ("refuse").
    """

    made_by = PairEncoder
    packings = ("pairs",)
    whole_sequences = True

    source_column: str = "source"
    target_column: str = "target"

    @property
    def columns(self) -> list[str]:
        return [self.source_column, self.target_column]

    def training_texts(self, document: Any) -> list[str]:
        """Return the source and the target."""
        return [_text(document, column, "data.source_column or data.target_column") for column in self.columns]


def _text(record: Mapping[str, Any], column: str, options: str) -> str:
    if column not in record:
        raise UserError(no_column(column, record, options))
    value = record[column]
    if not isinstance(value, str):
        raise UserError(f"the column {column!r} must hold text; got {type(value).__name__} {str(value)[:60]!r}")
    return value
