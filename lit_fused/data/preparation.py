"""Turn a source of documents into tokens on the disk: once, in several processes, and resumable after a kill.

The work is cut into pieces that are independent of each other. Finished pieces are joined in the source's order,
whatever the order in which they were finished.

    CACHE/text-KEY/             the result: tokenizer/, train/, val/ (each a TokenStore), report.json
    CACHE/.text-KEY.work/       while it is being made: a lock, the split, the tokenizer, pieces/

The key is a hash of the files' names, sizes and times of change, of the encoder, and of the split: the same inputs find
their result, and others have another one.

Each process holds a batch of documents in memory, and eight bytes per document where pieces are joined.
"""

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain
from multiprocessing import current_process
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from lit_fused.data.cache import digest, work_folder
from lit_fused.data.encoding import Encoder, UntrainedEncoder
from lit_fused.data.piece_encoding import UNGUARDED, Outcome, PieceJob, encode_pieces
from lit_fused.data.preparation_report import Report, read_report, write_report
from lit_fused.data.source import DocumentError, Piece, Source
from lit_fused.data.split import Split, choose_split
from lit_fused.data.store import TokenStore, TokenWriter
from lit_fused.data.tokenizer import vocab_size_of
from lit_fused.errors import UserError

FORMAT_VERSION = 1  # raise it whenever the same inputs would be prepared differently
SAMPLE_CHARACTERS = 2**25  # of the training documents, on which a tokenizer is trained


def prepare(
    source: Source,
    encoder: Encoder | UntrainedEncoder,
    *,
    kind: str,
    cache_dir: Path,
    val_fraction: float,
    max_bad_documents: int = 0,
    num_workers: int | None = None,
    show: bool = True,
) -> Report:
    """Prepare ``source`` in ``cache_dir``, unless the result is there, and return the report.

    Args:
        source: The documents.
        encoder: Makes them tokens. An untrained one is trained on a sample of the training documents.
        kind: Begins the folder's name.
        val_fraction: The share of the documents that is held out (see :mod:`lit_fused.data.split`).
        max_bad_documents: More bad documents end the preparation.
        num_workers: Processes that encode; 0: this one. None: as many as there are cores, for more than 64 MiB.
        show: Show the progress.

    Raises:
        UserError: There is nothing to prepare, too much of it is bad, or the cache cannot be written or is full.
    """
    if getattr(current_process(), "_inheriting", False):  # a worker imports the script, which would wait for itself
        raise UserError(UNGUARDED)
    start = time.perf_counter()
    pieces = source.pieces()
    parameters = digest(
        source=source.identity(), encoder=encoder.fingerprint(), val_fraction=val_fraction, version=FORMAT_VERSION
    )
    inputs = digest(pieces=[digest(piece=piece.fingerprint) for piece in pieces], parameters=parameters)
    folder = cache_dir / f"{kind}-{inputs}"
    if os.path.isdir(folder):  # False also where permission is lacking
        return _cached(folder, max_bad_documents)

    def say(what: str) -> None:
        if show:
            print(what, file=sys.stderr, flush=True)

    waiting = partial(say, f"waiting for another process that prepares {source.name}")
    with explain_full_disk(cache_dir), work_folder(cache_dir, f"{kind}-{parameters}", waiting, _has_pieces) as work:
        if folder.is_dir():
            return _cached(folder, max_bad_documents)
        split = _split(work / f"split-{inputs}.json", source, pieces, val_fraction, max_bad_documents)
        if isinstance(encoder, UntrainedEncoder):
            say(f"training a tokenizer on {source.name}")
            encoder = _trained(work / f"tokenizer-{inputs}", source, pieces, split, encoder)
        job = PieceJob(source, encoder, split, vocab_size_of(encoder.tokenizer), max_bad_documents)
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
        result = work / "result"
        _join_pieces(job, pieces, work / "pieces", result, report)
        report.seconds = time.perf_counter() - start
        write_report(result, report)
        try:
            os.rename(result, folder)
        except OSError:  # where locks do not reach (another machine on a network file system), it may be there by now
            if not folder.is_dir():
                raise
    return report


def _join_pieces(job: PieceJob, pieces: list[Piece], folder: Path, result: Path, report: Report) -> None:
    """Write the tokenizer and the two splits, and count documents and tokens in ``report``."""
    shutil.rmtree(result, ignore_errors=True)  # a killed process may have left it
    job.encoder.tokenizer.save_pretrained(result / "tokenizer")
    names = job.piece_names(pieces)
    for side in ("train", "val"):
        with TokenWriter(result / side, job.vocab_size) as writer:
            for name in names:
                writer.extend(TokenStore(folder / name / side))
        report.documents[side], report.tokens[side] = writer.num_documents, writer.num_tokens
        if not writer.num_documents:
            raise UserError(
                f"no document of {report.source} is left {'to train on' if side == 'train' else 'to hold out'}: "
                f"{sum(report.skipped.values())} were skipped, {report.notes or 'without notes'}; give more"
            )


def _split(file: Path, source: Source, pieces: list[Piece], val_fraction: float, max_bad_documents: int) -> Split:
    """Choose the split; ``file`` keeps it for a later process."""
    if file.exists():
        split = json.loads(file.read_text())
        return Split(**(split | {"lent": split["lent"] and tuple(split["lent"])}))
    outcome = Outcome()
    contents = _contents(source, pieces, outcome)
    first = next(contents, None)
    if first is None:
        outcome.check(max_bad_documents)
        raise UserError(f"{source.name} is empty: there is no text in it; set data.path to a file with text")
    split = choose_split(chain([first], contents), val_fraction)
    _write_json(file, asdict(split))
    return split


def _contents(source: Source, pieces: Iterable[Piece], outcome: Outcome) -> Iterator[Any]:
    for piece in pieces:
        for document in source.read(piece):
            if isinstance(document.content, DocumentError):
                outcome.fault(document, document.content)
            elif document.content:
                yield document.content


def _trained(folder: Path, source: Source, pieces: list[Piece], split: Split, encoder: UntrainedEncoder) -> Encoder:
    """Train the encoder on the first training documents of each piece, in proportion to its size.

    ``folder`` keeps the tokenizer for a later process.
    """
    if not folder.exists():
        total = max(1, sum(piece.size for piece in pieces))
        sample: list[Any] = []
        for piece in pieces:
            share = SAMPLE_CHARACTERS * piece.size // total
            for content in _contents(source, [piece], Outcome()):
                for side, part in split.sides(content):
                    if side == "train" and share > 0:
                        sample.append(part[:share] if isinstance(part, str) else part)
                        share -= len(part if isinstance(part, str) else str(part))
                if share <= 0:
                    break
        temporary = folder.with_name(folder.name + ".tmp")
        encoder.train(sample).save_pretrained(temporary)
        os.replace(temporary, folder)
    return encoder.build(PreTrainedTokenizerFast.from_pretrained(folder))


def _cached(folder: Path, max_bad_documents: int) -> Report:
    report = read_report(folder, cached=True)
    Outcome(bad=report.skipped["bad"], faults=report.bad).check(max_bad_documents)
    return report


def _has_pieces(work: Path) -> bool:
    return any((work / "pieces").glob("*/outcome.json"))


@contextmanager
def explain_full_disk(cache_dir: Path) -> Iterator[None]:
    """Turn an error of a full disk in the block into a :class:`UserError`."""
    try:
        yield
    except Exception as error:  # the tokenizers library raises plain ones
        reasons = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)]
        reason = next((reason for reason in reasons if reason in str(error)), None)
        if reason is None or isinstance(error, UserError):
            raise
        raise UserError(
            f"the cache folder {cache_dir} is full ({reason}): finished pieces are kept, nothing else; "
            "make room and run again, or set data.cache_dir to a folder with more"
        ) from error


def _write_json(file: Path, content: Any) -> None:
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(content))
    os.replace(temporary, file)
