"""Define the data module of everything that becomes tokens, and build it from one flat set of options."""

import os
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_fused.data.encoding import Encoding, Packing, TextEncoding
from lit_fused.data.loader import BatchDataModule, BatchLoader, counted
from lit_fused.data.mixture import MixedRows
from lit_fused.data.option_checks import check_weights
from lit_fused.data.packing import Rows
from lit_fused.data.preference_rows import ROWS, collate_of
from lit_fused.data.preparation_report import Report
from lit_fused.data.source import Source
from lit_fused.data.store import Integers
from lit_fused.data.stored_scores import StoredScores
from lit_fused.data.to_prepare import PreparedTokens, Sources, TokensToPrepare, compose
from lit_fused.data.token_arrays import TokenArrays
from lit_fused.data.tokenizer import tokenizer_digest
from lit_fused.errors import UserError, check_choice

_PROMPTS, _PROMPT_TOKENS = 64, 16  # held-out documents among which one is chosen, and the first tokens of a text


class TokenDataModule(BatchDataModule):
    """Batches of ``input_ids`` and ``labels``, int64 ``(batch_size, block_size)``, on the CPU.

    What else they have, and other lengths, depend on the packing (see :mod:`lit_fused.data`). Validation, test and
    prediction all use the validation split, of several sets one loader for each, by their names.

    Args:
        source: Where documents come from, or arrays of tokens; or several by name, which are mixed for training.
        encoding: How documents become tokens. None: the source is tokens already.
        val_source: What is held out, a source or several by name. None: ``val_fraction`` of each source.
        weights: A number of 0 or more for each of several sources. None: each row comes once in an epoch.
        block_size: Tokens per sample; for pairs, the most tokens of a source and of a target.
        val_fraction: The share of the documents (of arrays: of the tokens) that is held out.
        tokenizer: The name or folder of a tokenizer. None: one is trained on the training documents.
        vocab_size: The most entries that a trained tokenizer may have; a small text yields fewer.
        max_bad_documents: More documents that cannot be read or encoded end the preparation.
        cache_dir: Where prepared data are stored. None: ``$XDG_CACHE_HOME/lit_fused`` or ``~/.cache/lit_fused``.
        num_workers: Worker processes of each data loader.
        prepare_workers: Processes that prepare; 0: this one. None: one for each core, for more than 64 MiB.
        packing: "stream", "documents", "none" or "pairs" (``lit_fused/data/packing.py``), or of preferences "padded" or
            "packed" (``lit_fused/data/preference_rows.py``). None: the encoding's own.
        seed: The order of training batches depends on it and on the number of the epoch.
        scores: A file of ``mode=score``, whose numbers batches then have besides. None: no scores.

    ``prepare_data`` and ``setup`` raise UserError for data that are missing, bad, empty or too short.
    """

    def __init__(
        self,
        source: Sources,
        encoding: Encoding | None = None,
        *,
        val_source: Sources | None = None,
        weights: Mapping[str, float] | None = None,
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
        scores: str | Path | None = None,
    ) -> None:
        super().__init__(batch_size, num_workers, seed)
        self.to_prepare = TokensToPrepare(
            source,
            encoding,
            val_source=val_source,
            block_size=block_size,
            val_fraction=val_fraction,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            max_bad_documents=max_bad_documents,
            cache_dir=cache_dir,
            prepare_workers=prepare_workers,
        )
        packings = (encoding or TextEncoding).packings
        if packing is not None:
            check_choice("data.packing", packing, packings)
        sets = self.to_prepare.sets
        if weights is not None:
            check_weights(weights, [part.name for part in sets if part.val_fraction < 1])
        self.weights = None if weights is None else {str(name): float(weight) for name, weight in weights.items()}
        self.source, self.encoding, self.block_size = sets[0].source, encoding, block_size
        self.packing: Packing = packing or packings[0]
        self._prepared: PreparedTokens | None = None
        self.stored_scores = None if scores is None else StoredScores(scores)

    @property
    def source_names(self) -> list[str]:
        """Return the paths or names of all data."""
        return [part.source.name for part in self.to_prepare.sets]

    def prepare(self, *, show: bool = False) -> Report:
        """Prepare the data, or verify those in the cache, and return the report. ``show``: with a progress bar."""
        return self.to_prepare.prepare_and_verify(show=show)

    def prepare_data(self) -> None:
        """Prepare the data, unless the cache has them. Lightning calls it in one process of each node."""
        self.to_prepare.prepare(show=getattr(rank_zero_only, "rank", 0) == 0)

    def setup(self, stage: str | None = None) -> None:
        """Open the prepared data. Lightning calls it in every process."""
        if self._prepared is not None:
            return
        report = self.to_prepare.prepare()
        for part in [part for _, part in report.parts] or [report]:
            if part.notes:
                rank_zero_info(f"of {part.source}: " + ", ".join(f"{what}: {n:,}" for what, n in part.notes.items()))
        self._prepared = self.to_prepare.open(report)
        for name, store in self._prepared.to_train_on.items():
            tokens, which = store.num_tokens, f" {name}" * bool(name)
            is_used = self.weights is None or self.weights[name] > 0
            if tokens < self.block_size and self.packing == "stream" and is_used:
                raise UserError(
                    f"the text{which} is too short: its training split has {tokens} tokens, but one block needs "
                    f"data.block_size={self.block_size}; set data.block_size={tokens} or smaller, or give a longer text"
                )
        if self.stored_scores is not None:
            self.stored_scores.check_tokenizer(self.tokenizer_digest)
        if self.num_workers > 0:
            # Loader workers do not tokenise. Without this, tokenizers 0.22 warns at each fork that it stops threads.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Verify the prepared data, in one process of each node, when a checkpoint is resumed from or evaluated."""
        super().load_state_dict(state_dict)
        if self.trainer is not None and self.trainer.local_rank == 0:
            self.prepared.verify()

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
    def tokenizer_digest(self) -> str | None:
        """Return a hash of everything that decides how text is encoded; None without a tokenizer."""
        return None if self.tokenizer is None else tokenizer_digest(self.tokenizer)

    @property
    def vocab_size(self) -> int:
        """Return one more than the largest possible token; the model's vocabulary must be at least this."""
        return max(store.vocab_size for store in self.prepared.to_train_on.values())

    @property
    def pad_token_id(self) -> int:
        """Return what fills the rest of an input: the tokenizer's padding token, or else its end-of-text token."""
        candidates = [getattr(self.tokenizer, name, None) for name in ("pad_token_id", "eos_token_id")]
        return next((token for token in candidates if isinstance(token, int)), 0)

    def held_out_prompt(self) -> Tensor:
        """Return a prompt from the held-out documents, (1, T) int64, T >= 1, at most half a block: what precedes a
        first answer (the first user's turn, a pair's source), or the first tokens of a text."""
        store, most = self.prepared.val, max(1, self.block_size // 2)
        prompts: list[Integers] = []
        for start, end in pairwise([0, *store.ends[:_PROMPTS].tolist()]):
            tokens, wanted = store.read(start, end)
            before = 0 if wanted is None else int(wanted.argmax())
            prompts.append(tokens[: before or max(1, min(_PROMPT_TOKENS, most, len(tokens) // 2))])
        fitting = [prompt for prompt in prompts if len(prompt) <= most] or [min(prompts, key=len)[-most:]]
        # A text of a few words says little; the first of the longest beginnings is shown.
        return torch.from_numpy(fitting[0] if store.has_answers else max(fitting, key=len))[None]

    def train_dataloader(self) -> BatchLoader:
        parts = {name: self._rows("train", name) for name in self.prepared.to_train_on}
        rows = self._masked(MixedRows(parts, self.weights) if len(parts) > 1 else next(iter(parts.values())))
        folders = ", ".join(store.folder.parent.name for store in self.prepared.to_train_on.values())
        identity = f"{folders}, data.packing={self.packing}, data.block_size={self.block_size}"
        identity += "" if self.weights is None else f", data.weights={self.weights}"
        loader = self.training_batches(
            rows, identity, self._contents(len(rows)), collate_fn=collate_of(self.packing, self.pad_token_id)
        )
        share = rows.share_of_tokens_in(loader.batch_sampler.permutation(0), self.batch_size)
        rank_zero_info(f"data.packing={self.packing}: {rows.summary()}; {share:.2%} of all positions hold tokens")
        for logger in self.trainer.loggers if self.trainer is not None else ():
            logger.log_metrics({"data/share_of_tokens": share}, step=0)
        return loader

    def val_dataloader(self) -> Any:
        """Return a :class:`BatchLoader`; of several sets a dict of them, by name."""
        rows = {name: self._masked(self._rows("val", name)) for name in self.prepared.held_out}
        loaders = {name: self.batches_in_order(part) for name, part in rows.items()}
        return loaders.get("", loaders)

    def rows_in_order(self) -> dict[str, Rows]:
        """Return all rows by set, "train" and "val", or "train/web" and so on of several, without scores."""
        parts = [("train", name) for name in self.prepared.to_train_on]
        parts += [("val", name) for name in self.prepared.held_out]
        return {_set_name(*part): self._plain_rows(*part) for part in parts}

    def batches_in_order(self, rows: Rows) -> BatchLoader:
        """Return a loader of rows in their order."""
        return self.evaluation_batches(rows, collate_of(self.packing, self.pad_token_id))

    def _contents(self, num_rows: int) -> str:
        """Return how many documents train in how many rows."""
        if unit := {"pairs": "pair", "padded": "preference", "packed": "preference"}.get(self.packing):
            return counted(num_rows, unit)
        stores = self.prepared.to_train_on.items()
        documents = sum(s.num_documents for name, s in stores if self.weights is None or self.weights[name] > 0)
        most = "at most " * (self.packing == "none")
        return f"{counted(documents, 'document')} in {counted(num_rows, 'row')} of {most}{self.block_size} tokens"

    def _rows(self, split: str, name: str) -> Rows:
        rows = self._plain_rows(split, name)
        return rows if self.stored_scores is None else self.stored_scores.of(_set_name(split, name), rows)

    def _plain_rows(self, split: str, name: str) -> Rows:
        store = (self.prepared.to_train_on if split == "train" else self.prepared.held_out)[name]
        return ROWS[self.packing](store, self.block_size, self.pad_token_id)

    def _masked(self, rows: Rows) -> Rows:
        return rows if self.encoding is None else self.encoding.rows(rows, self.tokenizer, self.seed)


def _set_name(split: str, name: str) -> str:
    return f"{split}/{name}" if name else split


def compose_data(
    read: Callable[..., Source | TokenArrays],
    encode: Callable[..., Encoding] | Mapping[str, Callable[..., Encoding]] | None = None,
    format: str | None = None,
    **options: Any,
) -> TokenDataModule:
    """Build the source, the encoding and the data module, handing each option to all of them that name it.

    ``compose_data(FileSource, TextEncoding, path="corpus", block_size=512)`` is
    ``TokenDataModule(FileSource("corpus"), TextEncoding(), block_size=512)``.

    Args:
        read: The class of the source, or a function that builds it.
        encode: The class of the encoding; or several by name, of which ``format`` chooses one; None for token arrays.
        format: The name of the encoding, where there are several.
        options: Those of the source, of the encoding, and of the data module; others are refused.
    """
    return compose(TokenDataModule, read, encode, format, options)
