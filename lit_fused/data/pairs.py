"""Pairs of an input and its answer for encoder-decoders, made from the lines of a text.

A line becomes its words and signs, one space between them: that is the input. The answer is a function of it. Every
input occurs once, and goes to training or validation by its SHA-256, so that no line is in both and renaming, moving or
reordering files changes nothing. As with :class:`TextDataModule`, the tokenised pairs lie in a folder named after a
hash of what they depend on, here the pairs themselves.
"""

import hashlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import datasets
from lightning.pytorch.utilities import rank_zero_info
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast

from lit_fused.data.cache import content_key, prepare_once
from lit_fused.data.checks import check_fraction, check_int
from lit_fused.data.documents import read_documents
from lit_fused.data.prepared import PreparedDataModule, quiet_datasets
from lit_fused.data.tokenizer import MIN_VOCAB_SIZE, train_tokenizer
from lit_fused.errors import UserError

FORMAT_VERSION = 1  # raise it whenever the same pairs and parameters would be prepared differently

_WORD_OR_SIGNS = re.compile(r"\w+|[^\w\s]+")


def reverse_words(text: str) -> str:
    """The words in the opposite order: "return a + b" -> "b + a return"."""
    return " ".join(reversed(text.split()))


class LinePairsDataModule(PreparedDataModule):
    """Batches of ``input_ids`` and ``attention_mask`` (B, S) and ``labels`` (B, T), int64, on the CPU.

    Inputs and answers end with the tokenizer's end-of-text token. Each batch is padded to its longest sequences; labels
    are -100 there.

    Args:
        path: A text file; or a folder, of which every ``.txt``, ``.md`` and ``.py`` file is read. None: the sources of
            Python's standard library, found on the machine.
        answer: A function of the input, a string, that returns the answer.
        min_words, max_words: Shorter and longer lines are left out. Signs between words count as words.
        max_characters: So are inputs of more characters; one long sequence pads its whole batch.
        batch_size: Pairs per batch.
        vocab_size: The most entries that the tokenizer may have; a small text yields fewer.
        val_fraction: The share of the pairs that is held out.
        max_bytes: Read no more of the text than this.
        cache_dir: Where prepared pairs are kept. None: ``$XDG_CACHE_HOME/lit_fused`` or ``~/.cache/lit_fused``.
        num_workers: Worker processes of each data loader.
        seed: Of the order of training batches.

    Raises:
        UserError: A value is out of range, at construction; ``prepare_data`` and ``setup`` raise it for a text that is
            missing, undecodable, or without two such lines, and for a cache that cannot be written.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        answer: Callable[[str], str] = reverse_words,
        min_words: int = 3,
        max_words: int = 8,
        max_characters: int = 40,
        batch_size: int = 64,
        vocab_size: int = 2048,
        val_fraction: float = 0.05,
        max_bytes: int | None = None,
        cache_dir: str | Path | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, cache_dir, num_workers, seed)
        check_int("data.min_words", min_words, 1)
        check_int("data.max_words", max_words, min_words)
        check_int("data.max_characters", max_characters, 1)
        check_int("data.vocab_size", vocab_size, MIN_VOCAB_SIZE)
        check_fraction("data.val_fraction", val_fraction)
        if max_bytes is not None:
            check_int("data.max_bytes", max_bytes, 1)
        self.path = path
        self.answer = answer
        self.min_words = min_words
        self.max_words = max_words
        self.max_characters = max_characters
        self.max_vocab_size = vocab_size
        self.val_fraction = val_fraction
        self.max_bytes = max_bytes

    def _collator(self) -> DataCollatorForSeq2Seq:
        return DataCollatorForSeq2Seq(self.tokenizer)

    def _prepare_folder(self) -> Path:
        inputs = self._inputs()
        answers = [self.answer(text) for text in inputs]
        parameters = {
            "vocab_size": self.max_vocab_size,
            "val_fraction": self.val_fraction,
            "format_version": FORMAT_VERSION,
        }
        folder = self.cache_dir / f"pairs-{content_key([*inputs, *answers], **parameters)}"
        prepare_once(folder, partial(self._prepare_into, inputs, answers))
        return folder

    def _inputs(self) -> list[str]:
        """The inputs, each once, in the order of their SHA-256."""
        lines = (line for document in read_documents(self.path, self.max_bytes) for line in document.splitlines())
        words_of_lines = map(_WORD_OR_SIGNS.findall, lines)
        texts = {" ".join(words) for words in words_of_lines if self.min_words <= len(words) <= self.max_words}
        inputs = {text for text in texts if len(text) <= self.max_characters}
        if len(inputs) < 2:
            raise UserError(
                f"two lines of {self.min_words} to {self.max_words} words and at most {self.max_characters} characters "
                f"are needed, one to train on and one to hold out, but {self.path or 'the standard library'} has "
                f"{len(inputs)}; change data.min_words, data.max_words or data.max_characters, or give a longer text"
            )
        return sorted(inputs, key=lambda text: hashlib.sha256(text.encode()).digest())

    def _prepare_into(self, inputs: list[str], answers: list[str], folder: Path) -> None:
        """Write ``folder/tokenizer``, ``folder/train`` and ``folder/val``."""
        num_val = max(1, int(self.val_fraction * len(inputs)))
        rank_zero_info(f"preparing {len(inputs):,} pairs, {num_val:,} of them held out, in {self.cache_dir}")
        tokenizer = train_tokenizer(inputs[num_val:] + answers[num_val:], self.max_vocab_size, whole_sequences=True)
        tokenizer.save_pretrained(folder / "tokenizer")
        _save_pairs(inputs[num_val:], answers[num_val:], tokenizer, folder / "train")
        _save_pairs(inputs[:num_val], answers[:num_val], tokenizer, folder / "val")


def _save_pairs(inputs: list[str], answers: list[str], tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Special tokens that a text spells out are encoded as ordinary text."""
    input_ids, labels = (
        tokenizer(texts, split_special_tokens=True, return_attention_mask=False)["input_ids"]
        for texts in (inputs, answers)
    )
    tokens = datasets.List(datasets.Value("int32"))
    pairs = datasets.Dataset.from_dict(
        {"input_ids": input_ids, "labels": labels}, datasets.Features({"input_ids": tokens, "labels": tokens})
    )
    with quiet_datasets():
        pairs.save_to_disk(str(folder))
