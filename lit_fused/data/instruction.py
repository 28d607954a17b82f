"""Prompts and their completions as documents, loss on the completion only."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lit_fused.data.encoding import DocumentError, Encoder, UntrainedEncoder, tokenizer_digest
from lit_fused.data.module import TokenDataModule
from lit_fused.data.packing import Packing
from lit_fused.data.sources import FileSource
from lit_fused.data.store import Encoded
from lit_fused.data.tokenizer import train_tokenizer
from lit_fused.data.truncation import TooLong, check_too_long, fit_block
from lit_fused.errors import UserError

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


class InstructionDataModule(TokenDataModule):
    """Prompts and completions from files: loss on the completion, and on the token that ends it.

    Args:
        path: A ``.jsonl`` or ``.parquet`` file, compressed or not, or a folder of them: see
            :class:`lit_fused.data.sources.FileSource`.
        prompt, completion: See :class:`InstructionEncoding`.
        too_long: A document of more than ``block_size`` tokens is cut ("cut"), left out ("skip") or refused
            ("refuse"). One that is left without a completion is left out, and counted.
        encoding: Of JSON files.

    The other arguments are :class:`~lit_fused.data.module.TokenDataModule`'s.

    Raises:
        UserError: A value is out of range, at construction; ``prepare_data`` and ``setup`` raise it for files that are
            missing, bad or empty.
    """

    kind = "instruction"

    def __init__(
        self,
        path: str | Path,
        prompt: str = "prompt",
        completion: str | None = None,
        too_long: TooLong = "cut",
        encoding: str = "utf-8",
        block_size: int = 1024,
        batch_size: int = 8,
        val_fraction: float = 0.05,
        tokenizer: str | Path | None = None,
        vocab_size: int = 16384,
        max_bad_documents: int = 0,
        cache_dir: str | Path | None = None,
        num_workers: int = 0,
        prepare_workers: int | None = None,
        packing: Packing = "documents",
        seed: int = 0,
    ) -> None:
        super().__init__(
            block_size=block_size,
            batch_size=batch_size,
            val_fraction=val_fraction,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            max_bad_documents=max_bad_documents,
            cache_dir=cache_dir,
            num_workers=num_workers,
            prepare_workers=prepare_workers,
            packing=packing,
            seed=seed,
        )
        self.source = FileSource(path, None, encoding)
        self.encoding = InstructionEncoding(prompt, completion, too_long)

    def make_source(self) -> FileSource:
        return self.source

    def make_encoder(self, tokenizer: PreTrainedTokenizerBase | None) -> Encoder | UntrainedEncoder:
        return self.encoding.encoder(tokenizer, self.block_size, self.max_vocab_size)


@dataclass(frozen=True)
class InstructionEncoding:
    """Which columns are the prompt and the completion, whatever they come from.

    Attributes:
        prompt: The prompt's column, taken as it is; or text with ``{column}`` in it, such as ``"Q: {question}\\nA:"``;
            or "alpaca": the columns ``instruction`` and ``input`` (which may be missing or empty) in Alpaca's words.
        completion: The completion's column, taken as it is. None: ``output`` for Alpaca, else ``completion``.
        too_long: See :func:`lit_fused.data.truncation.fit_block`.
    """

    prompt: str = "prompt"
    completion: str | None = None
    too_long: TooLong = "cut"

    def __post_init__(self) -> None:
        check_too_long(self.too_long)

    @property
    def columns(self) -> list[str]:
        """Those of a record that are of use."""
        if self.prompt == "alpaca":
            return ["instruction", "input", self.completion or "output"]
        return [*(_FIELD.findall(self.prompt) or [self.prompt]), self.completion or "completion"]

    def encoder(
        self, tokenizer: PreTrainedTokenizerBase | None, block_size: int, vocab_size: int
    ) -> Encoder | UntrainedEncoder:
        """The encoder of a tokenizer, or (None) of one that is yet to be trained, of at most ``vocab_size`` entries."""
        if tokenizer is None:
            return UntrainedInstructionEncoder(vocab_size, block_size, self)
        return InstructionEncoder(tokenizer, block_size, self)

    def texts(self, record: Mapping[str, Any]) -> tuple[str, str]:
        """The prompt and the completion.

        Raises:
            DocumentError: A column is missing, or holds no text.
        """
        completion = _text(record, self.completion or ("output" if self.prompt == "alpaca" else "completion"))
        if self.prompt == "alpaca":
            template = _ALPACA_INPUT if record.get("input") else _ALPACA
        else:
            template = self.prompt if _FIELD.search(self.prompt) else f"{{{self.prompt}}}"
        return _FIELD.sub(lambda field: _text(record, field[1]), template), completion


class InstructionEncoder(Encoder):
    """The prompt's tokens, as the tokenizer makes them of the prompt alone, then the completion's and the end token.

    The prompt is encoded as ``tokenizer(prompt)`` does it, special tokens included, which is what a model is given when
    it answers. The completion's tokens are those that follow in the encoding of both together. Where that has a token
    with characters of both (prompt "a", completion "b", token "ab"), which a model that answers cannot say, the
    completion is encoded alone; if the tokenizer cannot do that without adding a space, the document is a fault.

    Args:
        tokenizer: With an end-of-text token.
        block_size: The most tokens of a document.
        encoding: The columns, and what becomes of longer documents.

    Raises:
        UserError: The tokenizer has no end-of-text token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        block_size: int,
        encoding: InstructionEncoding,
    ) -> None:
        eos = tokenizer.eos_token_id
        if not isinstance(eos, int):
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path} has no end-of-text token, which ends every completion; "
                "give it one: tokenizer.eos_token = '...', and tokenizer.save_pretrained(FOLDER)"
            )
        self._tokenizer = tokenizer
        self._eos = eos
        self.block_size = block_size
        self.encoding = encoding
        empty = tokenizer("")["input_ids"]
        self._closing = 1 if empty and empty[-1] == eos and tokenizer("a")["input_ids"][-1] == eos else 0

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    def fingerprint(self) -> dict[str, Any]:
        return {
            "encoder": "instruction",
            "version": 1,
            "tokenizer": tokenizer_digest(self.tokenizer),
            "block_size": self.block_size,
            **asdict(self.encoding),
        }

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
        """The tokens of each text, without an end-of-text token of the tokenizer's own."""
        try:
            encoded = self.tokenizer(
                texts, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False
            )["input_ids"]
        except (UnicodeEncodeError, TypeError) as error:
            raise DocumentError("it holds half of a surrogate pair (such as \\ud83d), which is no character") from error
        closing = self._closing if add_special_tokens else 0
        return [tokens[: len(tokens) - closing] for tokens in encoded]

    def _document(self, prompt: str, completion: str, prompt_tokens: list[int], whole: list[int]) -> Encoded:
        if not completion.strip():
            return Encoded(np.empty(0, np.int64), notes=("left out: the completion is empty",))
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


class UntrainedInstructionEncoder:
    """An :class:`InstructionEncoder` whose tokenizer is yet to be trained, on the prompts and completions."""

    def __init__(self, vocab_size: int, block_size: int, encoding: InstructionEncoding) -> None:
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.encoding = encoding

    def fingerprint(self) -> dict[str, Any]:
        return {
            "encoder": "instruction",
            "version": 1,
            "train": self.vocab_size,
            "block_size": self.block_size,
            **asdict(self.encoding),
        }

    def train(self, documents: list[dict[str, Any]]) -> PreTrainedTokenizerBase:
        texts: list[str] = []
        for record in documents:
            with suppress(DocumentError):  # it is counted and named when it is encoded
                texts.append("".join(self.encoding.texts(record)))
        return train_tokenizer(texts, self.vocab_size)

    def build(self, tokenizer: PreTrainedTokenizerBase) -> InstructionEncoder:
        return InstructionEncoder(tokenizer, self.block_size, self.encoding)


def _text(record: Any, column: str) -> str:
    if not isinstance(record, Mapping) or column not in record:
        there = ", ".join(map(str, record)) if isinstance(record, Mapping) else f"{type(record).__name__}"
        raise DocumentError(
            f"there is no column {column}; those that are there: {there or 'none'}. Set data.prompt or data.completion "
            "to some of them"
        )
    value = record[column]
    if not isinstance(value, str):
        raise DocumentError(f"the column {column} must hold text; got {type(value).__name__} {str(value)[:60]!r}")
    return value
