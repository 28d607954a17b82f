"""What the data modules of text share: a tokenizer and two splits, prepared once in a folder, and their loaders."""

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from lit_fused.data.cache import default_cache_dir
from lit_fused.data.checks import check_int
from lit_fused.errors import UserError


@dataclass(frozen=True)
class PreparedText:
    """What the cache holds; ``train`` and ``val`` have the columns ``input_ids`` and ``labels``."""

    tokenizer: PreTrainedTokenizerFast
    train: datasets.Dataset
    val: datasets.Dataset


class PreparedDataModule(LightningDataModule):
    """Reads a folder with ``tokenizer``, ``train`` and ``val``, which a subclass prepares.

    Validation, test and prediction all use the validation split. Training batches are shuffled anew each epoch from
    torch's global seed.

    Args:
        batch_size: Samples per batch.
        cache_dir: Where prepared texts are kept. None: ``$XDG_CACHE_HOME/lit_fused`` or ``~/.cache/lit_fused``.
        num_workers: Worker processes of each data loader.
    """

    def __init__(self, batch_size: int, cache_dir: str | Path | None, num_workers: int) -> None:
        super().__init__()
        check_int("data.batch_size", batch_size, 1)
        check_int("data.num_workers", num_workers, 0)
        self.batch_size = batch_size
        self.cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
        self.num_workers = num_workers
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
        folder = self._prepare_folder()
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
        self._prepared = PreparedText(tokenizer, self._load(folder / "train"), self._load(folder / "val"))
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
            collate_fn=self._collator(),
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )


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
