"""Text in, batches of packed token blocks out: read, train a tokenizer, tokenise, pack, and keep the result.

The one trick: the result lives in a folder named after a hash of everything it depends on. There is nothing to
invalidate: the same text and parameters find the folder, memory-mapped and shared by every process, and any other text
or parameter names another folder. The price is that the text is read (not tokenised) at each start, and once fits
into memory.
"""

from functools import partial
from pathlib import Path

import datasets
import numpy as np
import numpy.typing as npt
from lightning.pytorch.utilities import rank_zero_info
from transformers import PreTrainedTokenizerFast

from lit_fused.data.cache import content_key, prepare_once
from lit_fused.data.checks import check_fraction, check_int
from lit_fused.data.documents import read_documents, split_documents
from lit_fused.data.packing import pack_tokens
from lit_fused.data.prepared import PreparedDataModule, quiet_datasets
from lit_fused.data.tokenizer import EOS_TOKEN_ID, MIN_VOCAB_SIZE, PAD_TOKEN_ID, train_tokenizer
from lit_fused.errors import UserError

FORMAT_VERSION = 1  # raise it whenever the same text and parameters would be prepared differently


class TextDataModule(PreparedDataModule):
    """Packed blocks of a text: batches of ``input_ids`` and ``labels``, int64 ``(batch_size, block_size)``, on the CPU.

    Labels are unshifted, and -100 on the padding of each split's last block. Validation, test and prediction all use
    the validation split. Training batches are shuffled anew each epoch from torch's global seed.

    Args:
        path: A text file; or a folder, of which every ``.txt``, ``.md`` and ``.py`` file is read, recursively, each as
            one document. None: the sources of Python's standard library, found on the machine.
        block_size: Tokens per sample.
        batch_size: Samples per batch.
        vocab_size: The most entries that the tokenizer may have; a small text yields fewer.
        val_fraction: The share of the text, in characters, that is held out, by whole documents where they allow it.
        max_bytes: Read no more of the text than this.
        cache_dir: Where prepared texts are kept. None: ``$XDG_CACHE_HOME/lit_fused`` or ``~/.cache/lit_fused``.
        num_workers: Worker processes of each data loader.

    Raises:
        UserError: A value is out of range, at construction; ``prepare_data`` and ``setup`` raise it for a missing,
            empty, too short or undecodable text, and for a cache that cannot be written.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        block_size: int = 256,
        batch_size: int = 8,
        vocab_size: int = 16384,
        val_fraction: float = 0.05,
        max_bytes: int | None = None,
        cache_dir: str | Path | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, cache_dir, num_workers)
        check_int("data.block_size", block_size, 2)
        check_int("data.vocab_size", vocab_size, MIN_VOCAB_SIZE)
        check_fraction("data.val_fraction", val_fraction)
        if max_bytes is not None:
            check_int("data.max_bytes", max_bytes, 1)
        self.path = path
        self.block_size = block_size
        self.max_vocab_size = vocab_size
        self.val_fraction = val_fraction
        self.max_bytes = max_bytes

    def _load(self, folder: Path) -> datasets.Dataset:
        return super()._load(folder).with_format("torch")

    def _prepare_folder(self) -> Path:
        documents = read_documents(self.path, self.max_bytes)
        parameters = {
            "block_size": self.block_size,
            "vocab_size": self.max_vocab_size,
            "val_fraction": self.val_fraction,
            "max_bytes": self.max_bytes,
            "format_version": FORMAT_VERSION,
        }
        folder = self.cache_dir / f"text-{content_key(documents, **parameters)}"
        prepare_once(folder, partial(self._prepare_into, documents))
        return folder

    def _prepare_into(self, documents: list[str], folder: Path) -> None:
        """Write ``folder/tokenizer``, ``folder/train`` and ``folder/val``."""
        num_characters = sum(map(len, documents))
        rank_zero_info(f"preparing {len(documents)} documents ({num_characters:,} characters) in {self.cache_dir}")
        train_documents, val_documents = split_documents(documents, self.val_fraction)
        tokenizer = train_tokenizer(train_documents, self.max_vocab_size)
        tokenizer.save_pretrained(folder / "tokenizer")
        with quiet_datasets():
            train_tokens = _tokenize(train_documents, tokenizer, folder / "scratch.arrow")
            if len(train_tokens) < self.block_size:
                raise UserError(
                    f"the text is too short: its training split has {len(train_tokens)} tokens, but one block needs "
                    f"data.block_size={self.block_size}; set data.block_size={len(train_tokens)} or smaller, "
                    "or give a longer text"
                )
            self._save_blocks(train_tokens, folder / "train")
            val_tokens = _tokenize(val_documents, tokenizer, folder / "scratch.arrow")
            self._save_blocks(val_tokens, folder / "val")
        (folder / "scratch.arrow").unlink()

    def _save_blocks(self, tokens: npt.NDArray[np.int32], folder: Path) -> None:
        input_ids, labels = pack_tokens(tokens, self.block_size, PAD_TOKEN_ID)
        block = datasets.List(datasets.Value("int32"), length=self.block_size)
        features = datasets.Features({"input_ids": block, "labels": block})
        datasets.Dataset.from_dict({"input_ids": input_ids, "labels": labels}, features).save_to_disk(str(folder))


def _tokenize(documents: list[str], tokenizer: PreTrainedTokenizerFast, scratch_file: Path) -> npt.NDArray[np.int32]:
    """All documents' tokens, each document followed by the end-of-text token: ``(N,)``, backed by ``scratch_file``.

    Special tokens that a document spells out are encoded as ordinary text.
    """

    def tokenize_batch(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = tokenizer(
            batch["text"], add_special_tokens=False, split_special_tokens=True, return_attention_mask=False
        )
        return {"tokens": [[*tokens, EOS_TOKEN_ID] for tokens in encoded["input_ids"]]}

    tokens = datasets.Dataset.from_dict({"text": documents}).map(
        tokenize_batch,
        batched=True,
        batch_size=100,
        remove_columns="text",
        features=datasets.Features({"tokens": datasets.List(datasets.Value("int32"))}),
        cache_file_name=str(scratch_file),
        load_from_cache_file=False,
        new_fingerprint="tokens",
    )
    return tokens.data.column("tokens").combine_chunks().flatten().to_numpy()
