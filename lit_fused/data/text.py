"""Text in, batches of packed token blocks out: read, train a tokenizer, tokenise, pack, and keep the result.

The one trick: the result lives in a folder named after a hash of everything it depends on. There is nothing to
invalidate: the same text and parameters find the folder, memory-mapped and shared by every process, and any other text
or parameter names another folder. The price is that the text is read (not tokenised) at each start, and once fits
into memory.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from lit_fused.data.cache import content_key, default_cache_dir, prepare_once
from lit_fused.data.checks import check_fraction, check_int
from lit_fused.data.documents import read_documents, split_documents
from lit_fused.data.packing import pack_tokens
from lit_fused.data.tokenizer import EOS_TOKEN_ID, MIN_VOCAB_SIZE, PAD_TOKEN_ID, train_tokenizer
from lit_fused.errors import UserError

FORMAT_VERSION = 1  # raise it whenever the same text and parameters would be prepared differently


@dataclass(frozen=True)
class PreparedText:
    """What the cache holds; ``train`` and ``val`` have the columns ``input_ids`` and ``labels``."""

    tokenizer: PreTrainedTokenizerFast
    train: datasets.Dataset
    val: datasets.Dataset


class TextDataModule(LightningDataModule):
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
        super().__init__()
        check_int("data.block_size", block_size, 2)
        check_int("data.batch_size", batch_size, 1)
        check_int("data.vocab_size", vocab_size, MIN_VOCAB_SIZE)
        check_fraction("data.val_fraction", val_fraction)
        if max_bytes is not None:
            check_int("data.max_bytes", max_bytes, 1)
        check_int("data.num_workers", num_workers, 0)
        self.path = path
        self.block_size = block_size
        self.batch_size = batch_size
        self.max_vocab_size = vocab_size
        self.val_fraction = val_fraction
        self.max_bytes = max_bytes
        self.cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
        self.num_workers = num_workers
        self._prepared: PreparedText | None = None

    @property
    def prepared(self) -> PreparedText:
        """The tokenizer and the two splits, once ``setup`` has run."""
        if self._prepared is None:
            raise UserError("the text is not prepared yet; call prepare_data() and setup() on the data module first")
        return self._prepared

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer trained on the training split, once ``setup`` has run."""
        return self.prepared.tokenizer

    @property
    def vocab_size(self) -> int:
        """The number of entries of ``tokenizer``; the model's vocabulary must be at least this."""
        return len(self.tokenizer)

    def prepare_data(self) -> None:
        """Train the tokenizer, tokenise and pack, unless the cache has it already. Lightning calls it once per node."""
        self._prepare_folder()

    def setup(self, stage: str | None = None) -> None:
        """Load the prepared text, memory-mapped. Lightning calls it in every process."""
        if self._prepared is not None:
            return
        folder = self._prepare_folder()
        train, val = (
            datasets.Dataset.load_from_disk(str(folder / split)).with_format("torch") for split in ("train", "val")
        )
        self._prepared = PreparedText(PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer"), train, val)
        if self.num_workers > 0:
            # Workers do not tokenise; without this, tokenizers 0.22 warns at each fork that it stops its threads.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        # The last, smaller batch is dropped, unless it is the only one.
        train = self.prepared.train
        return self._dataloader(train, shuffle=True, drop_last=len(train) >= self.batch_size)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self._dataloader(self.prepared.val)

    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return self.val_dataloader()

    def _dataloader(
        self, split: Any, *, shuffle: bool = False, drop_last: bool = False
    ) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(
            split,
            self.batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

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
        with _quiet_datasets():
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


@contextmanager
def _quiet_datasets() -> Iterator[None]:
    """Without the progress bars of the datasets library, which are a setting of the whole process."""
    were_shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if were_shown:
            datasets.enable_progress_bars()
