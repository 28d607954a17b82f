"""What the data modules of text share: a tokenizer and two splits, prepared once in a folder, and their loaders."""

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from transformers import PreTrainedTokenizerFast

from lit_fused.data.cache import default_cache_dir
from lit_fused.data.loader import BatchDataModule, BatchLoader
from lit_fused.errors import UserError


@dataclass(frozen=True)
class PreparedText:
    """What the cache holds; ``train`` and ``val`` have the columns ``input_ids`` and ``labels``."""

    tokenizer: PreTrainedTokenizerFast
    train: datasets.Dataset
    val: datasets.Dataset


class PreparedDataModule(BatchDataModule):
    """Reads a folder with ``tokenizer``, ``train`` and ``val``, which a subclass prepares.

    Validation, test and prediction all use the validation split. Training batches are shuffled anew each epoch, in an
    order that ``seed`` and the epoch alone decide.

    Args:
        batch_size: Samples per batch.
        cache_dir: Where prepared texts are kept. None: ``$XDG_CACHE_HOME/lit_fused`` or ``~/.cache/lit_fused``.
        num_workers: Worker processes of each data loader.
        seed: Of the order of training batches.
    """

    def __init__(self, batch_size: int, cache_dir: str | Path | None, num_workers: int, seed: int = 0) -> None:
        super().__init__(batch_size, num_workers, seed)
        self.cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
        self._folder: Path | None = None
        self._prepared: PreparedText | None = None

    @abstractmethod
    def _prepare_folder(self) -> Path:
        """The folder with the prepared text, which is prepared now unless the cache has it."""

    def _load(self, folder: Path) -> datasets.Dataset:
        """One split, memory-mapped."""
        return datasets.Dataset.load_from_disk(str(folder))

    def _collator(self) -> Callable[[list[dict[str, Any]]], Any] | None:
        """What makes a batch of samples; None, the data loader's own way, where all have one length."""
        return None

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
        """Train the tokenizer and tokenise, unless the cache has it already. Lightning calls it once per node."""
        self._prepare_folder()

    def setup(self, stage: str | None = None) -> None:
        """Load the prepared text, memory-mapped. Lightning calls it in every process."""
        if self._prepared is not None:
            return
        folder = self._folder = self._prepare_folder()
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
        self._prepared = PreparedText(tokenizer, self._load(folder / "train"), self._load(folder / "val"))
        if self.num_workers > 0:
            # Workers do not tokenise; without this, tokenizers 0.22 warns at each fork that it stops its threads.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def train_dataloader(self) -> BatchLoader:
        train, folder = self.prepared.train, self._folder
        assert folder is not None  # its name is a hash of all that the samples depend on
        return self.training_batches(train, folder.name, collate_fn=self._collator())

    def val_dataloader(self) -> BatchLoader:
        return self.evaluation_batches(self.prepared.val, self._collator())

    def test_dataloader(self) -> BatchLoader:
        return self.val_dataloader()

    def predict_dataloader(self) -> BatchLoader:
        return self.val_dataloader()


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Without the progress bars of the datasets library, which are a setting of the whole process."""
    were_shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if were_shown:
            datasets.enable_progress_bars()
