"""Define the data module of everything that becomes tokens, and build it from one flat set of options."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from datasets import Dataset
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_fused.data.conversations import loss_weight as checked_weight
from lit_fused.data.encoding import Encoding, Packing, TextEncoding
from lit_fused.data.loader import BatchDataModule, BatchLoader
from lit_fused.data.mixture import MixedRows
from lit_fused.data.packing import Rows
from lit_fused.data.preference_rows import ROWS, collate_of
from lit_fused.data.records import load_records
from lit_fused.data.split import choose_split
from lit_fused.data.stored_scores import StoredScores
from lit_fused.data.tokenized import contents_of, notes_of, tokenized, trained_tokenizer
from lit_fused.data.tokenizer import load_tokenizer, vocab_size_of
from lit_fused.data.tokens import TokenArrays, Tokens
from lit_fused.errors import UserError, check_choice, check_number, check_whole, checked_options, did_you_mean

_PROMPT_TOKENS = 16  # the first ones of a text


@dataclass(frozen=True)
class Records:
    """A path and other options of :func:`lit_fused.data.records.load_records`."""

    path: str | Path | None
    options: Mapping[str, Any] = field(default_factory=dict)
    text_column: str | None = None  # where it has another name in these alone
    loss_weight: str | float | None = None  # as of TokenDataModule, of these alone

    def load(self, text_column: str | None, cache_dir: str | Path | None, weight: str | None) -> Dataset:
        """Return the records; of texts, with their column and that of their weights alone."""
        own = self.text_column or text_column
        options = {"cache_dir": cache_dir, **self.options}
        columns = None if own is None else [own, *([weight] if weight else [])]
        found = load_records(self.path, columns=columns, **options)
        return found if own is None or own == text_column else found.rename_column(own, str(text_column))


Source: TypeAlias = str | Path | Dataset | Records | TokenArrays | None
Sources: TypeAlias = Source | Mapping[str, Source]


class PreparedTokens(NamedTuple):
    """The tokenizer, if there is one, tokens to train on and held out by the names of their sets ("" of a single one),
    and a description for a person."""

    tokenizer: PreTrainedTokenizerBase | None
    to_train_on: dict[str, Tokens]
    held_out: dict[str, Tokens]
    report: str

    @property
    def train(self) -> Tokens:
        """The first tokens to train on."""
        return next(iter(self.to_train_on.values()))

    @property
    def val(self) -> Tokens:
        """The first tokens that are held out."""
        return next(iter(self.held_out.values()))


@dataclass(frozen=True, eq=False)
class _Set:
    name: str
    source: Any
    val_fraction: float  # 0 for training alone, and 1 for evaluation alone

    @property
    def path(self) -> str:
        path = getattr(self.source, "path", self.source)
        return "the standard library" if path is None else str(path)


class TokenDataModule(BatchDataModule):
    """Batches of ``input_ids`` and ``labels``, int64 ``(batch_size, block_size)``, on the CPU.

    What else they have, and other lengths, depend on the packing (see :mod:`lit_fused.data`). Validation, test and
    prediction all use the validation split, of several sets one loader for each, by their names.

    Args:
        source: What :func:`lit_fused.data.records.load_records` reads (a path or a name), a ``datasets.Dataset``, or
            arrays of tokens; or several by name, which are mixed for training. None: Python's standard library.
        encoding: How documents become tokens. None: the source is tokens already.
        val_source: What is held out, one or several by name. None: ``val_fraction`` of each source.
        weights: A number of 0 or more for each of several sources. None: each row comes once in an epoch.
        loss_weight: In training, a factor on the loss of each document: the column that has it, or the name by which
            messages have it; or a number, for one of several sources (:class:`Records`). None: 1.
        block_size: Tokens per sample; for pairs, the most tokens of a source and of a target.
        val_fraction: The share of the documents (of arrays: of the tokens) that is held out.
        tokenizer: The name or folder of a tokenizer. None: one is trained on the training documents.
        vocab_size: The most entries that a trained tokenizer may have; a small text yields fewer.
        cache_dir: Where records and tokens are stored. None: the datasets library's own place.
        num_workers: Worker processes of each data loader.
        prepare_workers: Processes that prepare. None: one for each core, for more than 64 MiB.
        packing: "stream", "documents", "none" or "pairs" (``lit_fused/data/packing.py``), or of preferences "padded" or
            "packed" (``lit_fused/data/preference_rows.py``). None: the encoding's own.
        seed: The order of training batches depends on it and on the number of the epoch.
        scores: A file of ``mode=score``, whose numbers batches then have besides. None: no scores.

    ``prepare_data`` and ``setup`` raise UserError for data that are missing, empty or too short.
    """

    @checked_options("data.", block_size=2, vocab_size=1)
    def __init__(
        self,
        source: Sources,
        encoding: Encoding | None = None,
        *,
        val_source: Sources = None,
        weights: Mapping[str, float] | None = None,
        loss_weight: str | float | None = None,
        block_size: int = 1024,
        batch_size: int = 8,
        val_fraction: float = 0.05,
        tokenizer: str | Path | None = None,
        vocab_size: int = 16384,
        cache_dir: str | Path | None = None,
        num_workers: int = 0,
        prepare_workers: int | None = None,
        packing: Packing | None = None,
        seed: int = 0,
        scores: str | Path | None = None,
    ) -> None:
        super().__init__(batch_size, num_workers, seed)
        check_number("data.val_fraction", val_fraction, "be between 0 and 1, exclusive", lambda x: 0 < x < 1)
        packings = (encoding or TextEncoding).packings
        self.packing: Packing = packing or packings[0]
        check_choice("data.packing", self.packing, packings)
        fraction = float(val_fraction) if val_source is None else 0.0
        self.sets = [_Set(name, part, fraction) for name, part in _named(source).items()]
        if val_source is not None:
            self.sets += [_Set(name, part, 1.0) for name, part in _named(val_source).items()]
        if encoding is not None:
            check_whole("data.vocab_size", vocab_size, encoding.min_vocab_size)
        own = {part.name: getattr(part.source, "loss_weight", None) for part in self.sets if part.val_fraction < 1}
        self.loss_weights = {name: loss_weight if weight is None else weight for name, weight in own.items()}
        self.is_weighted = any(weight is not None for weight in self.loss_weights.values())
        if self.is_weighted and (encoding is None or self.packing in ("padded", "packed")):
            raise UserError("data.loss_weight is for texts, conversations, instructions and pairs")
        self.weights = None if weights is None else {str(name): float(weight) for name, weight in weights.items()}
        self.encoding, self.block_size, self.max_vocab_size = encoding, block_size, vocab_size
        self.tokenizer_name, self.cache_dir, self.prepare_workers = tokenizer, cache_dir, prepare_workers
        self.stored_scores = None if scores is None else StoredScores(scores)

    @property
    def source_names(self) -> list[str]:
        """Return the paths or names of all data."""
        return [part.path for part in self.sets]

    def prepare_data(self) -> None:
        """Prepare the data, unless the cache has them. Lightning calls it in one process of each node."""
        _ = self.prepared

    def setup(self, stage: str | None = None) -> None:
        """Open the prepared data. Lightning calls it in every process."""
        if "\n  " in self.prepared.report:  # Some documents were cut or left out.
            rank_zero_info(self.prepared.report)

    @cached_property
    def prepared(self) -> PreparedTokens:
        """Return the tokens of all sets; the first use prepares them, or finds them in the cache."""
        tokenizer = None if self.tokenizer_name is None else load_tokenizer(self.tokenizer_name)
        notes: dict[_Set, Counter[str]] = {}
        if self.encoding is None:
            eos = getattr(tokenizer, "eos_token_id", None)
            sides = {part: part.source.open(part.val_fraction, eos) for part in self.sets}
        else:
            tokenizer, tables = self._encoded(tokenizer, self.encoding)
            size = vocab_size_of(tokenizer)
            sides = {
                part: (Tokens.of(table, False, size), Tokens.of(table, True, size)) for part, table in tables.items()
            }
            notes = {part: notes_of(table) for part, table in tables.items()}
        lines = []
        for part, (train, held_out) in sides.items():
            said = [f"{tokens.num_documents:,} documents, {tokens.num_tokens:,} tokens" for tokens in (train, held_out)]
            lines.append(f"{part.path}: {said[0]} to train on; {said[1]} held out")
            lines += [f"  {note}: {count:,}" for note, count in notes.get(part, {}).items()]
            wanted = [train] * (part.val_fraction < 1) + [held_out] * (part.val_fraction > 0)
            if not all(tokens.num_documents for tokens in wanted):
                raise UserError(f"{'; '.join(lines)}: one of the two sides is empty, give more documents")
        return PreparedTokens(
            tokenizer,
            {part.name: train for part, (train, _) in sides.items() if part.val_fraction < 1},
            {part.name: held_out for part, (_, held_out) in sides.items() if part.val_fraction > 0},
            "\n".join(lines),
        )

    def _encoded(
        self, tokenizer: PreTrainedTokenizerBase | None, encoding: Encoding
    ) -> tuple[PreTrainedTokenizerBase, dict[_Set, Dataset]]:
        """Return the tokenizer, trained if there is none, and the tokens of all sets."""
        column = encoding.text_column
        records, splits = {}, {}
        for part in self.sets:
            source = part.source if isinstance(part.source, Dataset | Records) else Records(part.source)
            weight = self._weight_column(part)
            found = source.load(column, self.cache_dir, weight) if isinstance(source, Records) else source
            records[part] = found
            splits[part] = choose_split(contents_of(found, column), part.val_fraction)
        if tokenizer is None:
            training = [(records[part], splits[part]) for part in self.sets if part.val_fraction < 1]
            tokenizer = trained_tokenizer(training, encoding, self.max_vocab_size)
        encoder = encoding.encoder(tokenizer, self.block_size)
        tables = {
            part: tokenized(records[part], encoder, splits[part], self.prepare_workers, self._weight_column(part))
            for part in self.sets
        }
        return encoder.tokenizer, tables

    def _weight_column(self, part: _Set) -> str | None:
        weight = self.loss_weights.get(part.name) if part.val_fraction < 1 else None
        return weight if isinstance(weight, str) else None

    def _weight_of_set(self, name: str) -> float | None:
        """Return the factor on the loss of a set that is trained on, None where no set has any."""
        weight = self.loss_weights[name]
        factor = 1.0 if isinstance(weight, str) else checked_weight(f"data.loss_weight of {name or 'the data'}", weight)
        return factor if self.is_weighted else None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the tokenizer; None where the data came as tokens, without one."""
        return self.prepared.tokenizer

    @property
    def vocab_size(self) -> int:
        """Return one more than the largest possible token; the model's vocabulary must be at least this."""
        return max(tokens.vocab_size for tokens in self.prepared.to_train_on.values())

    @property
    def pad_token_id(self) -> int:
        """Return what fills the rest of an input: the tokenizer's padding token, or else its end-of-text token."""
        candidates = [getattr(self.tokenizer, name, None) for name in ("pad_token_id", "eos_token_id")]
        return next((token for token in candidates if isinstance(token, int)), 0)

    def held_out_prompt(self) -> Tensor:
        """Return a prompt from the first held-out document, (1, T) int64, T >= 1, at most half a block: what precedes
        the first answer (the first user's turn, a pair's source), or the first tokens of a text."""
        held_out, most = self.prepared.val, max(1, self.block_size // 2)
        tokens, loss_mask = held_out.read(0, int(held_out.ends[0]))
        before = 0 if loss_mask is None else int(loss_mask.argmax())
        prompt = tokens[:before][-most:] if before else tokens[: max(1, min(_PROMPT_TOKENS, most, len(tokens) // 2))]
        return torch.from_numpy(prompt)[None]

    def train_dataloader(self) -> BatchLoader:
        parts = {name: self._rows("train", name, tokens) for name, tokens in self.prepared.to_train_on.items()}
        rows = self._masked(MixedRows(parts, self.weights) if len(parts) > 1 else next(iter(parts.values())))
        if (share := rows.share_of_tokens) is not None:
            rank_zero_info(f"data.packing={self.packing}: {share:.2%} of all positions hold tokens")
        return self.training_batches(rows, collate_of(self.packing, self.pad_token_id))

    def val_dataloader(self) -> Any:
        """Return a :class:`BatchLoader`; of several sets a dict of them, by name."""
        rows = {name: self._rows("val", name, tokens) for name, tokens in self.prepared.held_out.items()}
        loaders = {name: self.batches_in_order(self._masked(part)) for name, part in rows.items()}
        return loaders.get("", loaders)

    def rows_in_order(self) -> dict[str, Rows]:
        """Return all rows by set, "train" and "val", or "train/web" and so on of several, without scores."""
        sides = {"train": self.prepared.to_train_on, "val": self.prepared.held_out}
        return {
            _set_name(side, name): self._plain_rows(tokens)
            for side, parts in sides.items()
            for name, tokens in parts.items()
        }

    def batches_in_order(self, rows: Rows) -> BatchLoader:
        """Return a loader of rows in their order."""
        return self.evaluation_batches(rows, collate_of(self.packing, self.pad_token_id))

    def _plain_rows(self, tokens: Tokens) -> Rows:
        return ROWS[self.packing](tokens, self.block_size, self.pad_token_id)

    def _rows(self, side: str, name: str, tokens: Tokens) -> Rows:
        rows = self._plain_rows(tokens)
        rows.weight = self._weight_of_set(name) if side == "train" else None  # Evaluations compare whatever is weighed.
        return rows if self.stored_scores is None else self.stored_scores.of(_set_name(side, name), rows)

    def _masked(self, rows: Rows) -> Rows:
        return rows if self.encoding is None else self.encoding.rows(rows, self.tokenizer, self.seed)


def _set_name(side: str, name: str) -> str:
    return f"{side}/{name}" if name else side


def _named(source: Sources) -> dict[str, Source]:
    return {str(name): part for name, part in source.items()} if isinstance(source, Mapping) else {"": source}


def compose_data(
    read: Callable[..., Any],
    encode: Callable[..., Encoding] | Mapping[str, Callable[..., Encoding]] | None = None,
    format: str | None = None,
    **options: Any,
) -> TokenDataModule:
    """Build the data module from one flat set of options, each for whom names it in its signature.

    ``compose_data(load_records, TextEncoding, path="corpus", block_size=512)`` is
    ``TokenDataModule("corpus", TextEncoding(), block_size=512)``.

    Args:
        read: ``load_records``, or ``TokenArrays``.
        encode: The class of the encoding; or several by name, of which ``format`` chooses one; None for token arrays.
        format: The name of the encoding, where there are several.
        options: Those of ``read``, of the encoding, and of the data module; "path" and "val_path" are one path, or
            several by name, each perhaps ``{path: ..., and options of its own}``. Others are refused.
    """
    encodings: Mapping[Any, Any] = encode if isinstance(encode, Mapping) else {format: encode}
    check_choice("data.format", format, encodings)
    encoding = encodings[format]
    others = {name: value for part in encodings.values() if part for name, value in signature(part).parameters.items()}
    takes = [{*signature(part).parameters} if part else set() for part in (read, encoding, TokenDataModule)]
    takes[0] -= {"path", "cache_dir", "columns"}
    takes[2] -= {"source", "encoding", "val_source"}
    known = set.union(*takes, others, {"path", "val_path"})
    if unknown := [name for name in options if name not in known]:
        raise UserError(f"data.{unknown[0]} is unknown{did_you_mean(unknown[0], known)}; there are {sorted(known)}")
    for name in {*options} & {*others} - set.union(*takes):
        if (options[name] or None) != (others[name].default or None):  # It would have no effect.
            raise UserError(f"data.{name} is not for data.format={format}")
    of_read, of_encoding, of_module = ({name: options[name] for name in names if name in options} for names in takes)

    def source(given: Any) -> Any:
        if isinstance(given, Mapping) and "path" not in given:
            return {name: source(part) for name, part in given.items()}
        own = dict(given) if isinstance(given, Mapping) else {"path": given}
        if getattr(read, "func", read) is TokenArrays:  # Hydra gives classes as partials.
            return TokenArrays(**{**of_read, **own})
        of_set = {name: own.pop(name, None) for name in ("text_column", "loss_weight")}
        return Records(own.pop("path"), options={**of_read, **own}, **of_set)

    val_source = None if options.get("val_path") is None else source(options["val_path"])
    return TokenDataModule(
        source(options.get("path")), encoding(**of_encoding) if encoding else None, val_source=val_source, **of_module
    )
