"""Turn a source of documents into tokens on the disk: once, in several processes, and resumable after a kill.

The work is cut into pieces that are independent of each other. Finished pieces are joined in the source's order,
whatever the order in which they were finished.

    CACHE/text-KEY/             the result: tokenizer/, train/, val/ (each a TokenStore), report.json
    CACHE/.text-KEY.work/       while it is being made: a lock, the split, the tokenizer, pieces/

The key is a hash of the files' names, sizes and times of change, of the encoder, and of the split: the same inputs find
their result, and others have another one.

Each process holds a batch of documents in memory, and eight bytes per document where pieces are joined.
"""

import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import chain, count
from multiprocessing import current_process
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from lit_fused.data.cache import digest, prepare_once
from lit_fused.data.encoding import AnyEncoder, Encoder, UntrainedEncoder
from lit_fused.data.piece_encoding import SMALL, UNGUARDED, Outcome, PieceJob, encode_pieces, worker_pool, workers_for
from lit_fused.data.preparation_report import Report, read_report, say, write_report
from lit_fused.data.source import Document, DocumentError, Piece, Source
from lit_fused.data.split import SIDES, Side, Split, choose_split
from lit_fused.data.store import TokenStore, TokenWriter, damaged
from lit_fused.data.tokenizer import vocab_size_of
from lit_fused.errors import UserError

FORMAT_VERSION = 1  # raise it whenever the same inputs would be prepared differently
SAMPLE_CHARACTERS = 2**25  # of the training documents, on which a tokenizer is trained
LARGE_SAMPLE_CHARACTERS = 2**23  # the same of more than 64 MiB: training takes seconds and 200 MiB, not a minute
_SPACE = re.compile(r"\s")
_WITHOUT_SPACE = 2**16  # characters; training on words that never end takes a hundred bytes for each


def prepare(
    source: Source,
    encoder: AnyEncoder,
    *,
    kind: str,
    cache_dir: Path,
    val_fraction: float,
    max_bad_documents: int = 0,
    num_workers: int | None = None,
    show: bool = True,
) -> Report:
    """Prepare ``source`` in ``cache_dir``, unless the result is there, and return the report.

    ``kind`` begins the folder's name; an untrained encoder is trained on a sample of the training documents; the other
    options are those of :class:`~lit_fused.data.TokenDataModule`, and a ``val_fraction`` of 0 or 1 puts all documents
    on one side. UserError if there is nothing to prepare, too much of it is bad, or the cache cannot be written or is
    full.
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
    folder = cache_dir / f"{kind}-{inputs}"
    waiting = partial(say, f"waiting for another process that prepares {source.name}", shown=show)

    def make(result: Path) -> None:
        work = result.parent
        split = _split(work / f"split-{inputs}.json", source, pieces, val_fraction, max_bad_documents)
        trained = _trained(work / f"tokenizer-{inputs}", source, pieces, split, encoder, num_workers, show)
        job = PieceJob(source, trained, split, vocab_size_of(trained.tokenizer), max_bad_documents)
        outcome, resumed = encode_pieces(job, pieces, work / "pieces", num_workers, show)
        if [piece.fingerprint for piece in source.pieces()] != [piece.fingerprint for piece in pieces]:
            raise UserError(f"{source.name} was changed while it was being prepared; run again")
        report = Report(
            source.name,
            str(folder),
            skipped={"empty": outcome.empty, "bad": outcome.bad},
            bad=outcome.faults,
            notes=dict(outcome.notes),
            vocab_size=job.vocab_size,
            pieces={"total": len(pieces), "resumed": resumed},
        )
        sides = ("train",) if val_fraction == 0 else ("val",) if val_fraction == 1 else SIDES
        _join_pieces(job, pieces, work / "pieces", result, report, sides)
        report.seconds = time.perf_counter() - start
        write_report(result, report)

    cached = prepare_once(folder, make, work_name=f"{kind}-{parameters}", waiting=waiting)
    report = read_report(folder, cached=cached)
    Outcome(bad=report.skipped["bad"], faults=report.bad).check(max_bad_documents)
    return report


def shared_tokenizer(
    sources: list[Source],
    encoder: UntrainedEncoder,
    *,
    cache_dir: Path,
    val_fraction: float,
    max_bad_documents: int = 0,
    num_workers: int | None = None,
    show: bool = True,
) -> PreTrainedTokenizerFast:
    """Return a tokenizer that is trained on the training documents of several sources, unless the cache has it.

    The arguments are those of :func:`prepare`; a ``val_fraction`` of 0 holds nothing out.
    """
    pieces = [source.pieces() for source in sources]
    parts = [[source.identity(), [p.fingerprint for p in found]] for source, found in zip(sources, pieces, strict=True)]
    key = digest(sources=parts, encoder=encoder.fingerprint(), val_fraction=val_fraction, version=FORMAT_VERSION)
    folder = cache_dir / f"tokenizer-{key}"

    def make(result: Path) -> None:
        files = (result.parent / f"split-{number}-{key}.json" for number in count())
        splits = [
            _split(file, source, found, val_fraction, max_bad_documents)
            for file, source, found in zip(files, sources, pieces, strict=False)
        ]
        union = _TrainingParts([*zip(sources, splits, strict=True)])
        trained = _trained(
            result.parent / f"tokenizer-{key}", union, union.pieces(), Split(0), encoder, num_workers, show
        )
        trained.tokenizer.save_pretrained(result)

    prepare_once(folder, make, waiting=partial(say, "waiting for another process that trains a tokenizer", shown=show))
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain ones
        raise damaged(folder, error) from error


class _TrainingParts(Source):
    """Reads the documents that several sources train on, as one source."""

    def __init__(self, parts: list[tuple[Source, Split]]) -> None:
        self.parts, self.name = parts, " and ".join(source.name for source, _ in parts)

    def pieces(self) -> list[Piece]:
        found = [(number, piece) for number, (source, _) in enumerate(self.parts) for piece in source.pieces()]
        return [Piece(piece.size, piece.fingerprint, (number, piece)) for number, piece in found]

    def read(self, piece: Piece) -> Iterator[Document]:
        number, inner = piece.payload
        source, split = self.parts[number]
        for document in source.read(inner):
            if not isinstance(document.content, DocumentError) and document.content:
                for side, content in split.sides(document.content):
                    if side == "train":
                        yield document._replace(content=content)


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


def _split(file: Path, source: Source, pieces: list[Piece], val_fraction: float, max_bad_documents: int) -> Split:
    """Choose the split; ``file`` keeps it for a later process."""
    if file.exists():
        return Split(**json.loads(file.read_text()))
    outcome = Outcome()
    contents = _contents(source, pieces, outcome)
    first = next(contents, None)
    if first is None:
        outcome.check(max_bad_documents)
        raise UserError(f"{source.name} is empty: there is no text in it; set data.path to a file with text")
    # Nothing or everything is held out where other data are.
    whole = val_fraction in (0, 1)
    split = Split(val_fraction) if whole else choose_split(chain([first], contents), val_fraction)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(split)))
    os.replace(temporary, file)
    return split


def _contents(source: Source, pieces: Iterable[Piece], outcome: Outcome) -> Iterator[Any]:
    for piece in pieces:
        for document in source.read(piece):
            if isinstance(document.content, DocumentError):
                outcome.fault(document, document.content)
            elif document.content:
                yield document.content


def _trained(
    folder: Path,
    source: Source,
    pieces: list[Piece],
    split: Split,
    encoder: AnyEncoder,
    num_workers: int | None,
    show: bool,
) -> Encoder[Any]:
    """Train an encoder and keep it in ``folder``; in a process of its own, with its memory, if there are several."""
    if not isinstance(encoder, UntrainedEncoder):
        return encoder
    if not folder.exists():
        say(f"training a tokenizer on {source.name}", shown=show)
        if workers_for(sum(piece.size for piece in pieces), num_workers) < 2:
            _train(folder, source, pieces, split, encoder)
        else:
            with worker_pool(1, None, source, encoder, encoder.encoding) as pool:
                pool.submit(_train, folder, source, pieces, split, encoder).result()
    return encoder.encoding.encoder(PreTrainedTokenizerFast.from_pretrained(folder), encoder.block_size)


def _train(folder: Path, source: Source, pieces: list[Piece], split: Split, encoder: UntrainedEncoder) -> None:
    """Train a tokenizer on the first documents of each piece, in proportion to its size."""
    total, most = max(1, sum(piece.size for piece in pieces)), _sample_size(pieces)
    sample: list[Any] = []
    for piece in pieces:
        share = most * piece.size // total
        contents = _contents(source, [piece], Outcome())
        parts = (part for content in contents for side, part in split.sides(content) if side == "train")
        while share > 0 and (part := next(parts, None)) is not None:
            if isinstance(part, str) and most < SAMPLE_CHARACTERS and not _SPACE.search(part, 0, _WITHOUT_SPACE):
                share = min(share, _WITHOUT_SPACE)
            sample.append(part[:share] if isinstance(part, str) else part)
            share -= len(part if isinstance(part, str) else str(part))
    temporary = folder.with_name(folder.name + ".tmp")
    encoder.encoding.train(sample, encoder.vocab_size).save_pretrained(temporary)
    os.replace(temporary, folder)


def _sample_size(pieces: list[Piece]) -> int:
    return LARGE_SAMPLE_CHARACTERS if sum(piece.size for piece in pieces) > SMALL else SAMPLE_CHARACTERS
