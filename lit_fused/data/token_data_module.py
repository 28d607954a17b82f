"""The data module of everything that becomes tokens: prepared once on the disk, then put into rows and batches."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lit_fused.data.cache import default_cache_dir
from lit_fused.data.encoding import Encoding, Packing, UntrainedEncoder
from lit_fused.data.loader import BatchDataModule, BatchLoader
from lit_fused.data.old_runs import old_state
from lit_fused.data.option_checks import check_fraction, check_int
from lit_fused.data.packing import ROWS, PadRight, Rows
from lit_fused.data.preparation import prepare
from lit_fused.data.preparation_report import Report
from lit_fused.data.source import Source
from lit_fused.data.store import TokenStore
from lit_fused.data.text_encoding import TextEncoding
from lit_fused.data.token_arrays import TokenArrays
from lit_fused.data.tokenizer import load_tokenizer
from lit_fused.errors import UserError


@dataclass(frozen=True)
class PreparedTokens:
    """The content of the cache: two splits, the report of how they were made, and the tokenizer, if there is one."""

    tokenizer: PreTrainedTokenizerBase | None
    train: TokenStore
    val: TokenStore
    report: Report


class TokenDataModule(BatchDataModule):
    """Batches of ``input_ids`` and ``labels``, int64 ``(batch_size, block_size)``, on the CPU.

    With ``packing="documents"`` they also have ``position_ids``, which begin anew in each document. With ``"none"``
    they have ``attention_mask``, and the length of their longest document; with ``"pairs"`` also labels of another
    length than the inputs. Labels are unshifted, and -100 where no loss is wanted. Validation, test and prediction
    all use the validation split.

    Args:
        source: Where documents come from, or arrays of tokens.
        encoding: How documents become tokens. None: the source is tokens already.
        block_size: Tokens per sample; for pairs, the most tokens of a source and of a target.
        batch_size: Samples per batch.
        val_fraction: The share of the documents (of arrays: of the tokens) that is held out.
        tokenizer: The name or folder of a tokenizer. None: one is trained on the training documents.
        vocab_size: The most entries that a trained tokenizer may have; a small text yields fewer.
        max_bad_documents: More documents that cannot be read or encoded end the preparation.
        cache_dir: Where prepared data are stored. None: ``$XDG_CACHE_HOME/lit_fused`` or ``~/.cache/lit_fused``.
        num_workers: Worker processes of each data loader.
        prepare_workers: Processes that prepare; 0: this one. None: one for each core, for more than 64 MiB.
        packing: How documents become rows: "stream", "documents" or "none"; for pairs "pairs" (see
            ``lit_fused/data/packing.py``). None: the encoding's default.
        seed: The order of training batches depends on it and on the number of the epoch.

    Raises:
        UserError: A value is out of range, at construction; ``prepare_data`` and ``setup`` raise it for data that are
            missing, bad, empty or too short, and for a cache that cannot be written.
    """

    def __init__(
        self,
        source: Source | TokenArrays,
        encoding: Encoding | None = None,
        *,
        block_size: int = 1024,
        batch_size: int = 8,
        val_fraction: float = 0.05,
        tokenizer: str | Path | None = None,
        vocab_size: int = 16384,
        max_bad_documents: int = 0,
        cache_dir: str | Path | None = None,
        num_workers: int = 0,
        prepare_workers: int | None = None,
        packing: Packing | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers, seed)
        check_int("data.block_size", block_size, 2)
        check_fraction("data.val_fraction", val_fraction)
        check_int("data.max_bad_documents", max_bad_documents, 0)
        if prepare_workers is not None:
            check_int("data.prepare_workers", prepare_workers, 0)
        if isinstance(source, TokenArrays) != (encoding is None):
            raise UserError("a source of documents needs an encoding, and arrays of tokens have none")
        if encoding is None:
            packings = TextEncoding.packings
        else:
            check_int("data.vocab_size", vocab_size, encoding.min_vocab_size)
            packings = encoding.packings
            assert not isinstance(source, TokenArrays)
            source = source.select(encoding.text_column, encoding.columns)
        if packing is not None and packing not in packings:
            *names, last = [name for name in ROWS if name in packings]
            raise UserError(f"data.packing must be {', '.join(names)}{' or ' * bool(names)}{last}, got {packing!r}")
        self.source = source
        self.encoding = encoding
        self.block_size = block_size
        self.val_fraction = val_fraction
        self.tokenizer_name = tokenizer
        self.max_vocab_size = vocab_size
        self.max_bad_documents = max_bad_documents
        self.cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser().absolute()
        self.packing: Packing = packing or packings[0]
        self.prepare_workers = prepare_workers
        self._prepared: PreparedTokens | None = None

    def load_old_state(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state that an earlier version has saved in a checkpoint, if it is of one.

        ``FusedLMModule`` calls this with each checkpoint that it loads.

        Raises:
            UserError: The checkpoint is of a run whose tokenizer cannot be trained again, and none is given.
        """
        state = old_state(checkpoint, self.tokenizer_name)
        if state is not None:
            self.load_state_dict(state)

    # --- preparation ---------------------------------------------------------------------------------------------

    @cached_property
    def given_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the tokenizer that was asked for, if one was."""
        return None if self.tokenizer_name is None else load_tokenizer(self.tokenizer_name)

    def prepare(self, *, show: bool = False) -> Report:
        """Prepare the data, unless the cache has them, and return the report. ``show``: with a progress bar."""
        tokenizer = self.given_tokenizer
        if isinstance(self.source, TokenArrays):
            eos = None if tokenizer is None else tokenizer.eos_token_id
            return self.source.prepare(self.cache_dir, self.val_fraction, eos, show=show)
        assert self.encoding is not None
        if tokenizer is None:
            encoder = UntrainedEncoder(self.encoding, self.block_size, self.max_vocab_size)
        else:
            encoder = self.encoding.encoder(tokenizer, self.block_size)
        return prepare(
            self.source,
            encoder,
            kind=self.source.kind or self.encoding.kind,
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
        tokenizer = self.given_tokenizer
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
            # Loader workers do not tokenise. Without this, tokenizers 0.22 warns at each fork that it stops its
            # threads.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    @property
    def prepared(self) -> PreparedTokens:
        """Return the tokenizer and the two splits, once ``setup`` has run."""
        if self._prepared is None:
            raise UserError("the data are not prepared yet; call prepare_data() and setup() on the data module first")
        return self._prepared

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the tokenizer, once ``setup`` has run; None where the data came as tokens, without one."""
        return self.prepared.tokenizer

    @property
    def vocab_size(self) -> int:
        """Return one more than the largest possible token; the model's vocabulary must be at least this."""
        return self.prepared.train.vocab_size

    @property
    def pad_token_id(self) -> int:
        """Return what fills the rest of an input: the tokenizer's padding token, or else its end-of-text token.

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
        share = rows.share_of_tokens_in(loader.batch_sampler.permutation(0), self.batch_size)
        rank_zero_info(f"data.packing={self.packing}: {rows.summary()}; {share:.2%} of all positions hold tokens")
        for logger in self.trainer.loggers if self.trainer is not None else ():
            logger.log_metrics({"data/share_of_tokens": share}, step=0)
        return loader

    def val_dataloader(self) -> BatchLoader:
        return self.evaluation_batches(self._rows(self.prepared.val), self._collate())

    @cached_property
    def training_rows(self) -> Rows:
        """Return the samples of the training split, by their numbers."""
        return self._rows(self.prepared.train)

    def _rows(self, store: TokenStore) -> Rows:
        return ROWS[self.packing](store, self.block_size, self.pad_token_id)

    def _collate(self) -> PadRight | None:
        return PadRight(self.pad_token_id) if self.packing in ("none", "pairs") else None
