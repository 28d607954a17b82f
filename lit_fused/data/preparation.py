"""Turn a source of documents into tokens on the disk: once, in several processes, and resumable after a kill.

The work is cut into independent pieces, which are joined in the source's order when all are finished.

    CACHE/text-KEY/             the result: tokenizer/, train/, val/ (each a TokenStore), report.json
    CACHE/.text-KEY.work/       while it is being made: a lock, the tokenizer, pieces/

The key is a hash of the files' names, sizes and times of change, of the encoder, and of the split. Each process holds
a batch of documents in memory, and eight bytes per document where pieces are joined.
"""

import re
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from multiprocessing import current_process
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from transformers import PreTrainedTokenizerFast

from lit_fused.atomic import written_whole
from lit_fused.data.cache import digest, prepare_once
from lit_fused.data.encoding import AnyEncoder, Encoder, UntrainedEncoder
from lit_fused.data.piece_encoding import SMALL, UNGUARDED, PieceJob, encode_pieces, worker_pool, workers_for
from lit_fused.data.preparation_report import Outcome, Report, read_report, say, write_report
from lit_fused.data.source import DocumentError, Piece, Source
from lit_fused.data.split import SIDES, Side, Split, choose_split
from lit_fused.data.store import TokenStore, TokenWriter, damaged
from lit_fused.data.tokenizer import vocab_size_of
from lit_fused.errors import UserError

FORMAT_VERSION = 1  # raise it whenever the same inputs would be prepared differently
SAMPLE_CHARACTERS = 2**25  # of the training documents, on which a tokenizer is trained
LARGE_SAMPLE_CHARACTERS = 2**23  # the same of more than 64 MiB: training takes seconds and 200 MiB, not a minute
_SPACE = re.compile(r"\s")
_WITHOUT_SPACE = 2**16  # characters; training on words that never end takes a hundred bytes for each
_Part: TypeAlias = tuple[Source, list[Piece], Split]  # what a tokenizer is trained on


class Options(NamedTuple):
    """Those of :class:`~lit_fused.data.TokenDataModule` that hold for every set of documents; ``show`` the progress."""

    cache_dir: Path
    max_bad_documents: int = 0
    num_workers: int | None = None
    show: bool = True


def prepare(source: Source, encoder: AnyEncoder, kind: str, val_fraction: float, options: Options) -> Report:
    """Prepare ``source`` in the cache, unless the result is there, and return the report.

    ``kind`` begins the folder's name; an untrained encoder is trained on a sample of the training documents; a
    ``val_fraction`` of 0 or 1 puts all documents on one side. UserError if there is nothing to prepare, too much of it
    is bad, or the cache cannot be written or is full.
    """
    if getattr(current_process(), "_inheriting", False):  # a worker imports the script, which would wait for itself
        raise UserError(UNGUARDED)
    start = time.perf_counter()
    pieces = source.pieces()
    encoded_by = encoder.fingerprint()
    if isinstance(encoder, UntrainedEncoder) and _sample_size(pieces) != SAMPLE_CHARACTERS:
        encoded_by["sample"] = _sample_size(pieces)
    parameters = digest(source=source.identity(), encoder=encoded_by, val_fraction=val_fraction, version=FORMAT_VERSION)
    inputs = digest(pieces=[digest(piece=piece.fingerprint) for piece in pieces], parameters=parameters)
    folder = options.cache_dir / f"{kind}-{inputs}"
    waiting = partial(say, f"waiting for another process that prepares {source.name}", shown=options.show)

    def make(result: Path) -> None:
        work = result.parent
        split = _split(source, pieces, val_fraction, options)
        trained = _trained(work / f"tokenizer-{inputs}", [(source, pieces, split)], encoder, options)
        job = PieceJob(source, trained, split, vocab_size_of(trained.tokenizer), options.max_bad_documents)
        outcome, resumed = encode_pieces(job, pieces, work / "pieces", options.num_workers, options.show)
        if [piece.fingerprint for piece in source.pieces()] != [piece.fingerprint for piece in pieces]:
            raise UserError(f"{source.name} was changed while it was being prepared; run again")
        report = Report(**vars(outcome), source=source.name, folder=str(folder))
        report.vocab_size, report.pieces = job.vocab_size, {"total": len(pieces), "resumed": resumed}
        sides = ("train",) if val_fraction == 0 else ("val",) if val_fraction == 1 else SIDES
        _join_pieces(job, pieces, work / "pieces", result, report, sides)
        report.seconds = time.perf_counter() - start
        write_report(result, report)

    cached = prepare_once(folder, make, work_name=f"{kind}-{parameters}", waiting=waiting)
    report = read_report(folder, cached=cached)
    report.check(options.max_bad_documents)
    return report


def shared_tokenizer(
    sources: list[Source], encoder: UntrainedEncoder, val_fraction: float, options: Options
) -> PreTrainedTokenizerFast:
    """Return a tokenizer that is trained on the training documents of several sources, unless the cache has it."""
    pieces = [source.pieces() for source in sources]
    found = [[source.identity(), [p.fingerprint for p in some]] for source, some in zip(sources, pieces, strict=True)]
    key = digest(sources=found, encoder=encoder.fingerprint(), val_fraction=val_fraction, version=FORMAT_VERSION)
    folder = options.cache_dir / f"tokenizer-{key}"

    def make(result: Path) -> None:
        splits = [_split(source, some, val_fraction, options) for source, some in zip(sources, pieces, strict=True)]
        parts = [*zip(sources, pieces, splits, strict=True)]
        trained = _trained(result.parent / f"tokenizer-{key}", parts, encoder, options)
        trained.tokenizer.save_pretrained(result)

    waiting = partial(say, "waiting for another process that trains a tokenizer", shown=options.show)
    prepare_once(folder, make, waiting=waiting)
    return saved_tokenizer(folder)


def saved_tokenizer(folder: Path, name: str = "") -> PreTrainedTokenizerFast:
    """Return the tokenizer that a preparation has left in ``folder / name``."""
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder / name, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises plain ones
        raise damaged(folder, error) from error


def _join_pieces(
    job: PieceJob, pieces: list[Piece], folder: Path, result: Path, report: Report, sides: tuple[Side, ...]
) -> None:
    """Write the tokenizer and the two splits, and count documents and tokens in ``report``. ``sides`` have some."""
    job.encoder.tokenizer.save_pretrained(result / "tokenizer")
    names = job.piece_names(pieces)
    for side in SIDES:
        with TokenWriter(result / side, job.vocab_size) as writer:
            for name in names:
                store = TokenStore(folder / name / side)
                store.verify()  # a killed preparation may have left it long ago
                writer.extend(store)
        report.documents[side], report.tokens[side] = len(writer.ends), writer.num_tokens
        if not writer.ends and side in sides:
            raise UserError(
                f"no document of {report.source} is left {'to train on' if side == 'train' else 'to hold out'}: "
                f"{sum(report.skipped.values())} were skipped, {report.notes or 'without notes'}; give more"
            )


def _split(source: Source, pieces: list[Piece], val_fraction: float, options: Options) -> Split:
    outcome = Outcome()
    contents = _contents(source, pieces, outcome)
    first = next(contents, None)
    if first is None:
        outcome.check(options.max_bad_documents)
        raise UserError(f"{source.name} is empty: there is no text in it; set data.path to a file with text")
    if val_fraction in (0, 1):  # nothing or everything is held out where other data are
        return Split(val_fraction)
    return choose_split(chain([first], contents), val_fraction)


def _contents(source: Source, pieces: Iterable[Piece], outcome: Outcome) -> Iterator[Any]:
    for piece in pieces:
        for document in source.read(piece):
            if isinstance(document.content, DocumentError):
                outcome.add(document, document.content)
            elif document.content:
                yield document.content


def _trained(folder: Path, parts: list[_Part], encoder: AnyEncoder, options: Options) -> Encoder[Any]:
    """Train an encoder and keep it in ``folder``; in a process of its own, with its memory, if there are several."""
    if not isinstance(encoder, UntrainedEncoder):
        return encoder
    if not folder.exists():
        sources = [source for source, *_ in parts]
        say(f"training a tokenizer on {' and '.join(source.name for source in sources)}", shown=options.show)
        if workers_for(sum(piece.size for _, pieces, _ in parts for piece in pieces), options.num_workers) < 2:
            _train(folder, parts, encoder)
        else:
            with worker_pool(1, None, *sources, encoder, encoder.encoding) as pool:
                pool.submit(_train, folder, parts, encoder).result()
    return encoder.encoding.encoder(saved_tokenizer(folder), encoder.block_size)


def _train(folder: Path, parts: list[_Part], encoder: UntrainedEncoder) -> None:
    """Train a tokenizer on the first training documents of each piece, in proportion to its size."""
    all_pieces = [piece for _, pieces, _ in parts for piece in pieces]
    total, most = max(1, sum(piece.size for piece in all_pieces)), _sample_size(all_pieces)
    sample: list[Any] = []
    for source, piece, split in ((source, piece, split) for source, pieces, split in parts for piece in pieces):
        share, endless = most * piece.size // total, _WITHOUT_SPACE
        contents = _contents(source, [piece], Outcome())
        texts = (text for content in contents for side, text in split.sides(content) if side == "train")
        while share > 0 and (text := next(texts, None)) is not None:
            size = len(text if isinstance(text, str) else str(text))
            if isinstance(text, str):
                if size > _WITHOUT_SPACE and not _SPACE.search(text, 0, _WITHOUT_SPACE):
                    text = text[:endless]
                    endless -= len(text)
                text = text[:share]
            sample.append(text)
            share -= size
    with written_whole(folder) as temporary:
        encoder.encoding.train(sample, encoder.vocab_size).save_pretrained(temporary)


def _sample_size(pieces: list[Piece]) -> int:
    return LARGE_SAMPLE_CHARACTERS if sum(piece.size for piece in pieces) > SMALL else SAMPLE_CHARACTERS
