"""Encode prompts and their completions, with loss on the completion only."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from lit_fused.data.encoding import Packing, encoder_fingerprint, end_of_text, text_field, tokenize
from lit_fused.data.source import DocumentError
from lit_fused.data.store import Encoded
from lit_fused.data.tokenizer import MIN_VOCAB_SIZE, train_tokenizer
from lit_fused.data.truncation import TooLong, check_too_long, fit_block, leave_out

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


@dataclass(frozen=True)
class InstructionEncoding:
    """Documents are prompts with completions; loss is on the completion and on the token that ends it.

    Attributes:
        prompt: The prompt's column, taken as it is; or text with ``{column}`` in it, such as ``"Q: {question}\\nA:"``;
            or "alpaca": the columns ``instruction`` and ``input`` (which may be missing or empty) in Alpaca's words.
        completion: The completion's column, taken as it is. None: ``output`` for Alpaca, else ``completion``.
        too_long: A document of more than ``block_size`` tokens is cut ("cut"), left out ("skip") or refused
            ("refuse"). One without a completion after that is left out, and counted.
    """

    kind: ClassVar[str] = "instruction"
    packings: ClassVar[tuple[Packing, ...]] = ("documents", "none", "stream")
    min_vocab_size: ClassVar[int] = MIN_VOCAB_SIZE
    text_column = None

    prompt: str = "prompt"
    completion: str | None = None
    too_long: TooLong = "cut"

    def __post_init__(self) -> None:
        check_too_long(self.too_long)

    @property
    def _completion(self) -> str:
        return self.completion or ("output" if self.prompt == "alpaca" else "completion")

    @property
    def columns(self) -> list[str]:
        if self.prompt == "alpaca":
            return ["instruction", "input", self._completion]
        return [*(_FIELD.findall(self.prompt) or [self.prompt]), self._completion]

    def fingerprint(self, block_size: int, *, trained: bool = False) -> dict[str, Any]:
        return {"encoder": "instruction", "version": 1, "block_size": block_size, **asdict(self)}

    def train(self, documents: list[dict[str, Any]], vocab_size: int) -> PreTrainedTokenizerBase:
        texts: list[str] = []
        for record in documents:
            with suppress(DocumentError):  # encoding names and counts a bad record
                texts.append("".join(self.texts(record)))
        return train_tokenizer(texts, vocab_size)

    def encoder(self, tokenizer: PreTrainedTokenizerBase, block_size: int) -> "InstructionEncoder":
        return InstructionEncoder(tokenizer, block_size, self)

    def texts(self, record: Mapping[str, Any]) -> tuple[str, str]:
        """Return the prompt and the completion.

        Raises:
            DocumentError: A column is missing, or holds no text.
        """
        completion = _text(record, self._completion)
        if self.prompt == "alpaca":
            template = _ALPACA_INPUT if record.get("input") else _ALPACA
        else:
            template = self.prompt if _FIELD.search(self.prompt) else f"{{{self.prompt}}}"
        return _FIELD.sub(lambda match: _text(record, match[1]), template), completion


class InstructionEncoder:
    """Encode the prompt as the tokenizer does it alone, then the completion, then the end-of-text token.

    The prompt's tokens are ``tokenizer(prompt)``, special tokens included: that is what a model is given when it
    answers. The completion's tokens are those that follow in the encoding of both together. Where a token there would
    hold characters of both (prompt "a", completion "b", token "ab"), which a model that answers cannot produce, the
    completion is encoded alone. If the tokenizer cannot do that without adding a space, the document is bad.

    Args:
        tokenizer: With an end-of-text token.
        block_size: The most tokens of a document.
        encoding: The columns, and what becomes of longer documents.

    Raises:
        UserError: The tokenizer has no end-of-text token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, block_size: int, encoding: InstructionEncoding) -> None:
        self.tokenizer = tokenizer
        self.block_size = block_size
        self.encoding = encoding
        self._eos = eos = end_of_text(tokenizer, "which ends every completion")
        empty = tokenizer("")["input_ids"]
        self._closing = 1 if empty and empty[-1] == eos and tokenizer("a")["input_ids"][-1] == eos else 0

    def fingerprint(self) -> dict[str, Any]:
        return encoder_fingerprint(self.encoding, self.tokenizer, self.block_size)

    def __call__(self, documents: list[dict[str, Any]]) -> list[Encoded]:
        texts = [self.encoding.texts(record) for record in documents]
        if not texts:
            return []
        prompts = self._encode([prompt for prompt, _ in texts])
        wholes = self._encode([prompt + completion for prompt, completion in texts])
        return [
            self._document(*pair, prompt, whole) for pair, prompt, whole in zip(texts, prompts, wholes, strict=True)
        ]

    def _encode(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the tokens of each text, without an end-of-text token of the tokenizer's own."""
        encoded = tokenize(self.tokenizer, texts, add_special_tokens=add_special_tokens)["input_ids"]
        closing = self._closing if add_special_tokens else 0
        return [tokens[: len(tokens) - closing] for tokens in encoded]

    def _document(self, prompt: str, completion: str, prompt_tokens: list[int], whole: list[int]) -> Encoded:
        if not completion.strip():
            return leave_out("left out: the completion is empty")
        if whole[: len(prompt_tokens)] == prompt_tokens:
            answer = whole[len(prompt_tokens) :]
        else:
            (answer,) = self._encode([completion], add_special_tokens=False)
            if self.tokenizer.decode(prompt_tokens + answer) != self.tokenizer.decode(whole):
                raise DocumentError(
                    f"the prompt's end {prompt[-20:]!r} and the completion's beginning {completion[:20]!r} share a "
                    "token, and the tokenizer cannot encode the completion alone; put a space or a line break at the "
                    "beginning of the completion rather than at the end of the prompt"
                )
        tokens = np.array([*prompt_tokens, *answer, self._eos], dtype=np.int64)
        wanted = np.arange(len(tokens)) >= len(prompt_tokens)
        return fit_block(Encoded(tokens, wanted), self.block_size, self.encoding.too_long)


def _text(record: Any, column: str) -> str:
    return text_field(record, column, "data.prompt or data.completion")
