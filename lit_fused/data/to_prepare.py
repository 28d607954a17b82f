"""Define what is prepared: a source, an encoding and options. This file loads no torch, so that a large corpus can be
prepared before a process needs the memory for it."""

from collections.abc import Callable, Mapping
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lit_fused.data.cache import default_cache_dir
from lit_fused.data.encoding import Encoding, UntrainedEncoder
from lit_fused.data.file_source import FileSource
from lit_fused.data.option_checks import check_fraction, check_ints
from lit_fused.data.piece_encoding import SMALL
from lit_fused.data.preparation import prepare
from lit_fused.data.preparation_report import Report
from lit_fused.data.source import Source
from lit_fused.data.store import TokenStore, damaged
from lit_fused.data.token_arrays import TokenArrays
from lit_fused.data.tokenizer import load_tokenizer
from lit_fused.errors import UserError


class PreparedTokens(NamedTuple):
    """The content of the cache: two splits, the report of how they were made, and the tokenizer, if there is one."""

    tokenizer: PreTrainedTokenizerBase | None
    train: TokenStore
    val: TokenStore
    report: Report

    def verify(self) -> None:
        """Read all of it, about a gigabyte a second; raise ``UserError`` if it is not what was written."""
        self.train.verify()
        self.val.verify()


class TokensToPrepare:
    """The data of a :class:`~lit_fused.data.TokenDataModule`, which describes the arguments."""

    def __init__(
        self,
        source: Source | TokenArrays,
        encoding: Encoding | None = None,
        *,
        block_size: int = 1024,
        val_fraction: float = 0.05,
        tokenizer: str | Path | None = None,
        vocab_size: int = 16384,
        max_bad_documents: int = 0,
        cache_dir: str | Path | None = None,
        prepare_workers: int | None = None,
    ) -> None:
        check_ints(2, block_size=block_size)
        check_fraction("data.val_fraction", val_fraction)
        check_ints(0, max_bad_documents=max_bad_documents, prepare_workers=prepare_workers or 0)
        if isinstance(source, TokenArrays) != (encoding is None):
            raise UserError("a source of documents needs an encoding, and arrays of tokens have none")
        if encoding is not None and not isinstance(source, TokenArrays):
            check_ints(encoding.min_vocab_size, vocab_size=vocab_size)
            source = source.select(encoding.text_column, encoding.columns)
        self.source, self.encoding = source, encoding
        self.block_size, self.val_fraction = block_size, val_fraction
        self.tokenizer_name, self.max_vocab_size = tokenizer, vocab_size
        self.max_bad_documents, self.prepare_workers = max_bad_documents, prepare_workers
        self.cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser().absolute()

    @property
    def is_large(self) -> bool:
        """Return whether these are files of more than 64 MiB, which several processes prepare."""
        return isinstance(self.source, FileSource) and sum(piece.size for piece in self.source.pieces()) > SMALL

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
        untrained = UntrainedEncoder(self.encoding, self.block_size, self.max_vocab_size)
        return prepare(
            self.source,
            untrained if tokenizer is None else self.encoding.encoder(tokenizer, self.block_size),
            kind=self.source.kind or self.encoding.kind,
            cache_dir=self.cache_dir,
            val_fraction=self.val_fraction,
            max_bad_documents=self.max_bad_documents,
            num_workers=self.prepare_workers,
            show=show,
        )

    def prepare_and_verify(self, *, show: bool = False) -> Report:
        """Prepare the data, or verify those in the cache, and return the report."""
        report = self.prepare(show=show)
        if report.cached:
            self.open(report).verify()
        return report

    def open(self, report: Report) -> PreparedTokens:
        """Return what a preparation has made."""
        folder, tokenizer = Path(report.folder), self.given_tokenizer
        if tokenizer is None and self.encoding is not None:
            try:
                tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer", local_files_only=True)
            except Exception as error:  # the tokenizers library raises plain ones
                raise damaged(folder, error) from error
        return PreparedTokens(tokenizer, TokenStore(folder / "train"), TokenStore(folder / "val"), report)


def tokens_to_prepare(
    read: Callable[..., Any], encode: Any = None, format: str | None = None, **options: Any
) -> TokensToPrepare:
    """Build what ``compose_data`` would prepare with the same options; those of rows and batches are ignored."""
    of_rows = {"batch_size", "num_workers", "packing", "seed"}
    return compose(TokensToPrepare, read, encode, format, {name: options[name] for name in options.keys() - of_rows})


def compose(
    module: type[Any],
    read: Callable[..., Source | TokenArrays],
    encode: Callable[..., Encoding] | Mapping[str, Callable[..., Encoding]] | None,
    format: str | None,
    options: Mapping[str, Any],
) -> Any:
    """Build ``module`` as :func:`lit_fused.data.compose_data` says."""
    others: dict[str, Any] = {}
    if isinstance(encode, Mapping):
        if format is None or format not in encode:
            *names, last = encode
            raise UserError(f"data.format must be {', '.join(names)} or {last}; got {format!r}")
        others = {name: signature(part).parameters for name, part in encode.items()}
        encode = encode[format]
    parts = [part for part in (read, encode, module) if part is not None]
    takes = {part: set(signature(part).parameters) for part in parts}
    takes[module] -= {"source", "encoding"}
    for name in options.keys() - set().union(*takes.values()):
        owners = {key: parameters[name] for key, parameters in others.items() if name in parameters}
        if not owners:
            raise UserError(f"data.{name} is unknown; {', '.join(map(_name, parts))} do not take it")
        if (options[name] or None) != next(iter(owners.values())).default:  # it would have no effect
            raise UserError(f"data.{name} is for data.format={' or '.join(owners)}, but data.format is {format}")
    chosen = {part: {name: options[name] for name in names if name in options} for part, names in takes.items()}
    encoding = None if encode is None else encode(**chosen[encode])
    return module(read(**chosen[read]), encoding, **chosen[module])


def _name(part: Callable[..., Any]) -> str:
    return getattr(part, "func", part).__name__  # Hydra gives classes as partials
