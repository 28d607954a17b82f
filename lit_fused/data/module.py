"""The data module of everything that becomes tokens: prepared once on the disk, then packed into batches."""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lit_fused.data.cache import default_cache_dir
from lit_fused.data.checks import check_fraction, check_int
from lit_fused.data.encoding import Encoder, UntrainedEncoder, load_tokenizer
from lit_fused.data.loader import BatchDataModule, BatchLoader
from lit_fused.data.packing import DocumentBlocks, Packing, PadRight, SingleDocuments, StreamBlocks
from lit_fused.data.preparation import Report, prepare
from lit_fused.data.sources import Source
from lit_fused.data.store import TokenStore
from lit_fused.data.tokenizer import MIN_VOCAB_SIZE
from lit_fused.errors import UserError


@dataclass(frozen=True)
class PreparedTokens:
    """What the cache holds: two splits, how they were made, and the tokenizer, if there is one."""

    tokenizer: PreTrainedTokenizerBase | None
    train: TokenStore
    val: TokenStore
    report: Report


class TokenDataModule(BatchDataModule):
    """Batches of ``input_ids`` and ``labels``, int64 ``(batch_size, block_size)``, on the CPU.

    With ``packing="documents"`` they also have ``position_ids``, which begin anew in each document; with ``"none"``
    they have ``attention_mask``, and the length of their longest document. Labels are unshifted, and -100 where no loss
    is wanted. Validation, test and prediction all use the validation split. A subclass says what is read
    (:meth:`make_source`) and how it becomes tokens (:meth:`make_encoder`).

    Args:
        block_size: Tokens per sample.
        batch_size: Samples per batch.
        val_fraction: The share of the documents that is held out.
        tokenizer: The name or folder of a tokenizer. None: one is trained on the training documents.
        vocab_size: The most entries that a trained tokenizer may have; a small text yields fewer.
        max_bad_documents: More documents that cannot be read or encoded end the preparation.
        cache_dir: Where prepared data are kept. None: ``$XDG_CACHE_HOME/lit_fused`` or ``~/.cache/lit_fused``.
        num_workers: Worker processes of each data loader.
        packing: How documents become rows: "stream", "documents" or "none" (see ``lit_fused/data/packing.py``).
        seed: Of the order of training batches, with the number of the epoch.
        prepare_workers: Processes that prepare; 0: this one. None: one for each core, for more than 64 MiB.
    """

    kind: str  # how the folder's name in the cache begins
    min_vocab_size = MIN_VOCAB_SIZE

    def __init__(
        self,
        block_size: int,
        batch_size: int,
        val_fraction: float,
        tokenizer: str | Path | None,
        vocab_size: int,
        max_bad_documents: int,
        cache_dir: str | Path | None,
        num_workers: int,
        prepare_workers: int | None,
        packing: Packing = "stream",
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers, seed)
        check_int("data.block_size", block_size, 2)
        check_fraction("data.val_fraction", val_fraction)
        check_int("data.vocab_size", vocab_size, self.min_vocab_size)
        check_int("data.max_bad_documents", max_bad_documents, 0)
        if packing not in _ROWS:
            raise UserError(f"data.packing must be stream, documents or none, got {packing!r}")
        if prepare_workers is not None:
            check_int("data.prepare_workers", prepare_workers, 0)
        self.block_size = block_size
        self.val_fraction = val_fraction
        self.tokenizer_name = tokenizer
        self.max_vocab_size = vocab_size
        self.max_bad_documents = max_bad_documents
        self.cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser().absolute()
        self.packing = packing
        self.prepare_workers = prepare_workers
        self._given_tokenizer: PreTrainedTokenizerBase | None = None
        self._prepared: PreparedTokens | None = None

    # --- what a subclass says ------------------------------------------------------------------------------------

    def make_source(self) -> Source:
        """What is read."""
        raise NotImplementedError

    def make_encoder(self, tokenizer: PreTrainedTokenizerBase | None) -> Encoder | UntrainedEncoder:
        """How documents become tokens, with the tokenizer that was asked for, if one was."""
        raise NotImplementedError

    def given_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer that was asked for, loaded once."""
        if self._given_tokenizer is None and self.tokenizer_name is not None:
            self._given_tokenizer = load_tokenizer(self.tokenizer_name)
        return self._given_tokenizer

    # --- preparation ---------------------------------------------------------------------------------------------

    def prepare(self, *, show: bool = False) -> Report:
        """Prepare the data, unless the cache has them, and say what is there. ``show``: with a progress bar."""
        return prepare(
            self.make_source(),
            self.make_encoder(self.given_tokenizer()),
            kind=self.kind,
            cache_dir=self.cache_dir,
            val_fraction=self.val_fraction,
            max_bad_documents=self.max_bad_documents,
            num_workers=self.prepare_workers,
            show=show,
        )

    def prepare_data(self) -> None:
        """Prepare the data, unless the cache has them. Lightning calls it in one process of each node."""
        self.prepare(show=getattr(rank_zero_only, "rank", 0) == 0)

    def setup(self, stage: str | None = None) -> None:
        """Map the prepared data into memory. Lightning calls it in every process."""
        if self._prepared is not None:
            return
        report = self.prepare()
        if report.notes:
            rank_zero_info(f"of {report.source}: " + ", ".join(f"{what}: {n:,}" for what, n in report.notes.items()))
        folder = Path(report.folder)
        tokenizer = self.given_tokenizer()
        if tokenizer is None and (folder / "tokenizer").is_dir():
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
        self._prepared = PreparedTokens(tokenizer, TokenStore(folder / "train"), TokenStore(folder / "val"), report)
        num_tokens = self._prepared.train.num_tokens
        if num_tokens < self.block_size and self.packing == "stream":
            raise UserError(
                f"the text is too short: its training split has {num_tokens} tokens, but one block needs "
                f"data.block_size={self.block_size}; set data.block_size={num_tokens} or smaller, or give a longer text"
            )
        if self.num_workers > 0:
            # Workers do not tokenise; without this, tokenizers 0.22 warns at each fork that it stops its threads.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    @property
    def prepared(self) -> PreparedTokens:
        """The tokenizer and the two splits, once ``setup`` has run."""
        if self._prepared is None:
            raise UserError("the data are not prepared yet; call prepare_data() and setup() on the data module first")
        return self._prepared

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer, once ``setup`` has run; None where the data came as tokens, without one."""
        return self.prepared.tokenizer

    @property
    def vocab_size(self) -> int:
        """One more than the largest token that there can be; the model's vocabulary must be at least this."""
        return self.prepared.train.vocab_size

    @property
    def pad_token_id(self) -> int:
        """What fills the rest of an input: the tokenizer's padding token, or its end-of-text token where it has none.

        Labels are -100 there by position, so that nothing depends on the number.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            return 0
        return next(token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if isinstance(token, int))

    # --- batches -------------------------------------------------------------------------------------------------

    def train_dataloader(self) -> BatchLoader:
        rows, folder = self.training_rows, Path(self.prepared.report.folder)
        identity = f"{folder.name}, data.packing={self.packing}, data.block_size={self.block_size}"
        loader = self.training_batches(rows, identity, collate_fn=self._collate())
        if isinstance(rows, SingleDocuments):
            share = rows.share_of_tokens_in(loader.batch_sampler.permutation(0), self.batch_size)
        else:
            share = rows.share_of_tokens
        rank_zero_info(f"data.packing={self.packing}: {rows.summary()}; {share:.2%} of all positions hold tokens")
        for logger in self.trainer.loggers if self.trainer is not None else ():
            logger.log_metrics({"data/share_of_tokens": share}, step=0)
        return loader

    def val_dataloader(self) -> BatchLoader:
        return self.evaluation_batches(self._rows(self.prepared.val), self._collate())

    def test_dataloader(self) -> BatchLoader:
        return self.val_dataloader()

    def predict_dataloader(self) -> BatchLoader:
        return self.val_dataloader()

    @cached_property
    def training_rows(self) -> StreamBlocks | DocumentBlocks | SingleDocuments:
        """The samples of the training split, by their numbers."""
        return self._rows(self.prepared.train)

    def _rows(self, store: TokenStore) -> StreamBlocks | DocumentBlocks | SingleDocuments:
        return _ROWS[self.packing](store, self.block_size, self.pad_token_id)

    def _collate(self) -> PadRight | None:
        return PadRight(self.pad_token_id) if self.packing == "none" else None


_ROWS = {"stream": StreamBlocks, "documents": DocumentBlocks, "none": SingleDocuments}
