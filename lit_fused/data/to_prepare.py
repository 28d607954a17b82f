"""Define what is prepared: a source, an encoding and options. This file loads no torch, so that a large corpus can be
prepared before a process needs the memory for it."""

from collections.abc import Callable, Mapping
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from transformers import PreTrainedTokenizerBase

from lit_fused.data.cache import default_cache_dir
from lit_fused.data.encoding import Encoding, UntrainedEncoder
from lit_fused.data.file_source import FileSource
from lit_fused.data.option_checks import check_fraction, check_names
from lit_fused.data.piece_encoding import SMALL
from lit_fused.data.preparation import Options, prepare, saved_tokenizer, shared_tokenizer
from lit_fused.data.preparation_report import Report, joined
from lit_fused.data.source import Source
from lit_fused.data.store import TokenStore
from lit_fused.data.token_arrays import TokenArrays
from lit_fused.data.tokenizer import load_tokenizer
from lit_fused.errors import UserError, check_choice, check_whole, checked_options

Sources: TypeAlias = Source | TokenArrays | Mapping[str, Source | TokenArrays]


class PreparedTokens(NamedTuple):
    """The content of the cache: stores to train on and to evaluate on, by the names of their sets ("" of a single one),
    the report of how they were made, and the tokenizer, if there is one."""

    tokenizer: PreTrainedTokenizerBase | None
    to_train_on: dict[str, TokenStore]
    held_out: dict[str, TokenStore]
    report: Report

    @property
    def train(self) -> TokenStore:
        """The first store to train on."""
        return next(iter(self.to_train_on.values()))

    @property
    def val(self) -> TokenStore:
        """The first store to evaluate on."""
        return next(iter(self.held_out.values()))

    def verify(self) -> None:
        """Read all of it, about a gigabyte a second; raise ``UserError`` if it is not what was written."""
        for store in (*self.to_train_on.values(), *self.held_out.values()):
            store.verify()


class DataSet(NamedTuple):
    """One of several sets of documents, a source or arrays of tokens."""

    name: str
    source: Any
    val_fraction: float  # 0 for training alone, and 1 for evaluation alone


class TokensToPrepare:
    """The data of a :class:`~lit_fused.data.TokenDataModule`, which describes the arguments."""

    @checked_options("data.", block_size=2, vocab_size=1, max_bad_documents=0, prepare_workers=0)
    def __init__(
        self,
        source: Sources,
        encoding: Encoding | None = None,
        *,
        val_source: Sources | None = None,
        block_size: int = 1024,
        val_fraction: float = 0.05,
        tokenizer: str | Path | None = None,
        vocab_size: int = 16384,
        max_bad_documents: int = 0,
        cache_dir: str | Path | None = None,
        prepare_workers: int | None = None,
    ) -> None:
        check_fraction("data.val_fraction", val_fraction)
        train_fraction = float(val_fraction) if val_source is None else 0.0
        self.sets = [DataSet(name, part, train_fraction) for name, part in _named("data.path", source).items()]
        if val_source is not None:
            self.sets += [DataSet(name, part, 1.0) for name, part in _named("data.val_path", val_source).items()]
        if any(isinstance(part.source, TokenArrays) != (encoding is None) for part in self.sets):
            raise UserError("a source of documents needs an encoding, and arrays of tokens have none")
        if encoding is not None:
            check_whole("data.vocab_size", vocab_size, encoding.min_vocab_size)
            columns = encoding.text_column, encoding.columns
            self.sets = [part._replace(source=part.source.select(*columns)) for part in self.sets]
        self.encoding, self.block_size, self.val_fraction = encoding, block_size, val_fraction
        self.tokenizer_name, self.max_vocab_size = tokenizer, vocab_size
        self.max_bad_documents, self.prepare_workers = max_bad_documents, prepare_workers
        self.cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser().absolute()

    @property
    def is_large(self) -> bool:
        """Return whether these are files of more than 64 MiB, which several processes prepare."""
        files = [part.source for part in self.sets if isinstance(part.source, FileSource)]
        return sum(piece.size for source in files for piece in source.pieces()) > SMALL

    @cached_property
    def given_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the tokenizer that was asked for, if one was."""
        return None if self.tokenizer_name is None else load_tokenizer(self.tokenizer_name)

    def prepare(self, *, show: bool = False) -> Report:
        """Prepare the data, unless the cache has them, and return the report. ``show``: with a progress bar."""
        options = Options(self.cache_dir, self.max_bad_documents, self.prepare_workers, show)
        tokenizer, encoding = self.given_tokenizer, self.encoding
        if encoding is None:
            eos = None if tokenizer is None else tokenizer.eos_token_id
            reports = [source.prepare(self.cache_dir, fraction, eos, show=show) for _, source, fraction in self.sets]
        else:
            encoder = UntrainedEncoder(encoding, self.block_size, self.max_vocab_size)
            if tokenizer is None and len(self.sets) > 1:
                sources = [part.source for part in self.sets if part.val_fraction < 1]
                tokenizer = shared_tokenizer(sources, encoder, self.sets[0].val_fraction, options)
            encoder = encoder if tokenizer is None else encoding.encoder(tokenizer, self.block_size)
            sets = [(source, source.kind or encoding.kind, fraction) for _, source, fraction in self.sets]
            reports = [prepare(source, encoder, kind, fraction, options) for source, kind, fraction in sets]
        return reports[0] if len(reports) == 1 else joined([part.name for part in self.sets], reports)

    def prepare_and_verify(self, *, show: bool = False) -> Report:
        """Prepare the data, or verify those in the cache, and return the report."""
        report = self.prepare(show=show)
        if report.cached:
            self.open(report).verify()
        return report

    def open(self, report: Report) -> PreparedTokens:
        """Return what a preparation has made."""
        folders = [Path(part.folder) for _, part in report.parts] or [Path(report.folder)]
        tokenizer = self.given_tokenizer
        if tokenizer is None and self.encoding is not None:
            tokenizer = saved_tokenizer(folders[0], "tokenizer")
        pairs = [*zip(self.sets, folders, strict=True)]
        trained = {part.name: TokenStore(folder / "train") for part, folder in pairs if part.val_fraction < 1}
        held_out = {part.name: TokenStore(folder / "val") for part, folder in pairs if part.val_fraction > 0}
        return PreparedTokens(tokenizer, trained, held_out, report)


def _named(option: str, source: Sources) -> dict[str, Source | TokenArrays]:
    if not isinstance(source, Mapping):
        return {"": source}
    check_names(option, source)
    return {str(name): part for name, part in source.items()}


def tokens_to_prepare(
    read: Callable[..., Any], encode: Any = None, format: str | None = None, **options: Any
) -> TokensToPrepare:
    """Build what ``compose_data`` would prepare with the same options; those of rows and batches are ignored."""
    of_rows = {"batch_size", "num_workers", "packing", "scores", "seed", "weights"}
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
        check_choice("data.format", format, encode)
        assert format is not None
        others = {name: signature(part).parameters for name, part in encode.items()}
        encode = encode[format]
    parts = [part for part in (read, encode, module) if part is not None]
    takes = {part: set(signature(part).parameters) for part in parts}
    takes[module] -= {"source", "encoding", "val_source"}
    for name in options.keys() - set().union(*takes.values(), {"val_path"}):
        owners = {key: parameters[name] for key, parameters in others.items() if name in parameters}
        if not owners:
            raise UserError(f"data.{name} is unknown; {', '.join(map(_name, parts))} do not take it")
        if (options[name] or None) != (next(iter(owners.values())).default or None):  # it would have no effect
            raise UserError(f"data.{name} is for data.format={' or '.join(owners)}, but data.format is {format}")
    chosen = {part: {name: options[name] for name in names if name in options} for part, names in takes.items()}
    encoding = None if encode is None else encode(**chosen[encode])
    path, val_path = options.get("path"), options.get("val_path")
    if isinstance(path, Mapping) or isinstance(val_path, Mapping) or "val_path" not in takes[read]:
        chosen[read].pop("val_path", None)  # arrays of tokens open a single pair of files themselves
        val_source = None if val_path is None else _sources("data.val_path", val_path, read, chosen[read])
        chosen[module] |= {"val_source": val_source}
    return module(_sources("data.path", path, read, chosen[read]), encoding, **chosen[module])


def _sources(option: str, path: Any, read: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Return the source of a path, or those of several by their names. Each may have options of its own."""
    if not isinstance(path, Mapping):
        return read(**options) if option == "data.path" else read(**{**options, "path": path})
    takes, found = [*signature(read).parameters, "text_column"], {}
    for name, given in path.items():
        own = dict(given) if isinstance(given, Mapping) else {"path": given}
        unknown = [key for key in own if key not in takes]
        if unknown or not isinstance(own.get("path"), str | Path):
            what = f"{unknown[0]} is unknown, a set takes {', '.join(takes)}" if unknown else f"got {given!r}"
            raise UserError(f"{option}.{name} must be a path, or a path with options of its own, {{path: ...}}; {what}")
        column = own.pop("text_column", None)
        found[str(name)] = read(**{**options, **own})
        found[str(name)].own_column = column
    return found


def _name(part: Callable[..., Any]) -> str:
    return getattr(part, "func", part).__name__  # Hydra gives classes as partials
