"""Turn a source of documents into tokens on the disk: once, in several processes, and from where it was killed.

The one trick: the work is cut into pieces that do not know of each other. Each becomes a folder under its final name
by one rename when it is finished, so that a killed preparation leaves finished pieces and nothing else of worth; the
next run takes them up, and puts the rest beside them. Only when all are there are they joined, in the source's order,
whatever the order in which they were finished.

    CACHE/text-KEY/             the result: tokenizer/, train/, val/ (each a TokenStore), report.json
    CACHE/.text-KEY.work/       while it is being made: a lock, the split, the tokenizer, pieces/

The key is a hash of the files' names, sizes and times of change, of the encoder, and of the split: the same inputs find
their result, and others have another one.

In memory: a batch of documents per process, and eight bytes per document where pieces are joined.
"""

import errno
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, islice
from multiprocessing import current_process, get_all_start_methods, get_context, parent_process
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from lit_fused.data.cache import digest, work_folder
from lit_fused.data.encoding import DocumentError, Encoder, UntrainedEncoder, vocab_size_of
from lit_fused.data.progress import show_progress
from lit_fused.data.sources import Document, Piece, Source
from lit_fused.data.split import Side, Split, choose_split
from lit_fused.data.store import Encoded, TokenStore, TokenWriter
from lit_fused.errors import UserError

FORMAT_VERSION = 1  # raise it whenever the same inputs would be prepared differently
SAMPLE_CHARACTERS = 2**25  # of the training documents, on which a tokenizer is trained
_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 256, 2**20
_SMALL = 2**26  # bytes: less is not worth starting processes for
_REPORT = "report.json"
_UNGUARDED = 'a script that starts processes must do its work below `if __name__ == "__main__":`'
_SHOWN = 10  # bad documents that are named


@dataclass
class Report:
    """What a preparation did.

    Attributes:
        source: What was read.
        folder: Where the result lies.
        cached: It was there already, and nothing was done.
        documents, tokens: By split.
        skipped: The number of documents without text or tokens, and of bad ones.
        bad: The first bad documents, and what is wrong with each.
        notes: How often the encoder said what.
        vocab_size: One more than the largest token that there can be.
        seconds: How long it took, this time.
        pieces: Of how many pieces it was made, and how many of them an earlier run had finished.
    """

    source: str
    folder: str
    cached: bool = False
    documents: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    vocab_size: int = 0
    seconds: float = 0.0
    pieces: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        skipped = ", ".join(f"{count:,} {what}" for what, count in self.skipped.items() if count) or "none"
        rows = {
            "cached" if self.cached else "prepared": self.source,
            "documents": _by_split(self.documents),
            "tokens": _by_split(self.tokens),
            "skipped": "; ".join([skipped, *self.bad]),
            **({"notes": ", ".join(f"{what}: {count:,}" for what, count in self.notes.items())} if self.notes else {}),
            "vocabulary": f"{self.vocab_size:,} entries",
            "folder": self.folder,
        }
        if not self.cached:
            resumed = f", of which {self.pieces['resumed']} were there" if self.pieces["resumed"] else ""
            rows["time"] = f"{self.seconds:.1f} s, {self.pieces['total']} piece(s){resumed}"
        return "\n".join(f"{name:<12}{value}" for name, value in rows.items())


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
    """Make sure that the result lies in ``cache_dir``, and say where, and what is in it.

    Args:
        source: The documents.
        encoder: Their way to tokens. One that is yet to be trained is trained on a sample of the training documents.
        kind: How the folder's name begins.
        val_fraction: The share of the documents that is held out (see :mod:`lit_fused.data.split`).
        max_bad_documents: More of them end the preparation.
        num_workers: Processes that encode; 0: this one. None: as many as there are cores, for more than 64 MiB.
        show: Show the progress.

    Raises:
        UserError: There is nothing to prepare, too much of it is bad, or the cache cannot be written or is full.
    """
    if getattr(current_process(), "_inheriting", False):  # a worker imports the script, which would wait for itself
        raise UserError(_UNGUARDED)
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
    with full_disk_said(cache_dir), work_folder(cache_dir, f"{kind}-{parameters}", waiting, _has_pieces) as work:
        if folder.is_dir():
            return _cached(folder, max_bad_documents)
        split = _split(work / f"split-{inputs}.json", source, pieces, val_fraction, max_bad_documents)
        if isinstance(encoder, UntrainedEncoder):
            say(f"training a tokenizer on {source.name}")
            encoder = _trained(work / f"tokenizer-{inputs}", source, pieces, split, encoder)
        job = _Job(source, encoder, split, vocab_size_of(encoder.tokenizer), max_bad_documents)
        outcomes, resumed = _encode(job, pieces, work / "pieces", num_workers, show)
        if [piece.fingerprint for piece in source.pieces()] != [piece.fingerprint for piece in pieces]:
            raise UserError(f"{source.name} was changed while it was being prepared; run again")
        whole = _Outcome()
        for outcome in outcomes:
            whole.add(outcome)
        report = Report(
            source.name,
            str(folder),
            skipped={"empty": whole.empty, "bad": whole.bad},
            bad=whole.faults,
            notes=dict(whole.notes),
            vocab_size=job.vocab_size,
            pieces={"total": len(pieces), "resumed": resumed},
        )
        result = work / "result"
        shutil.rmtree(result, ignore_errors=True)  # of a killed process
        encoder.tokenizer.save_pretrained(result / "tokenizer")
        names = job.piece_names(pieces)
        for side in ("train", "val"):
            with TokenWriter(result / side, job.vocab_size) as writer:
                for name in names:
                    writer.extend(TokenStore(work / "pieces" / name / side))
            report.documents[side], report.tokens[side] = writer.num_documents, writer.num_tokens
            if not writer.num_documents:
                raise UserError(
                    f"no document of {source.name} is left {'to train on' if side == 'train' else 'to hold out'}: "
                    f"{sum(report.skipped.values())} were skipped, {report.notes or 'without notes'}; give more"
                )
        report.seconds = time.perf_counter() - start
        write_report(result, report)
        try:
            os.rename(result, folder)
        except OSError:  # where locks do not reach (another machine on a network file system), it may be there by now
            if not folder.is_dir():
                raise
    return report


@dataclass
class _Outcome:
    """What became of a piece."""

    empty: int = 0
    bad: int = 0
    faults: list[str] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)

    def fault(self, document: Document, fault: DocumentError) -> None:
        self.bad += 1
        if len(self.faults) < _SHOWN:
            self.faults.append(f"{document.where()}: {fault}")

    def add(self, other: "_Outcome") -> None:
        self.empty += other.empty
        self.bad += other.bad
        self.faults = [*self.faults, *other.faults][:_SHOWN]
        self.notes.update(other.notes)


@dataclass(frozen=True)
class _Job:
    """What every piece is encoded with."""

    source: Source
    encoder: Encoder
    split: Split
    vocab_size: int
    max_bad_documents: int

    def piece_names(self, pieces: list[Piece]) -> list[str]:
        parameters = digest(encoder=self.encoder.fingerprint(), split=asdict(self.split))
        return [digest(piece=piece.fingerprint, parameters=parameters) for piece in pieces]

    def encode(self, piece: Piece, folder: Path, stopped: Callable[[], bool]) -> _Outcome | None:
        """Make the piece's folder; None if ``stopped`` came true meanwhile."""
        temporary = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)  # of a killed process
        outcome = _Outcome()
        try:
            with (
                TokenWriter(temporary / "train", self.vocab_size) as train,
                TokenWriter(temporary / "val", self.vocab_size) as val,
            ):
                for batch in _batches(self._documents(piece, outcome)):
                    if stopped():
                        return None
                    for side, encoded in self._encode_batch(batch, outcome):
                        outcome.notes.update(encoded.notes)
                        outcome.empty += not len(encoded.tokens)
                        (train if side == "train" else val).append(encoded)
                    _check_bad(outcome, self.max_bad_documents)
            (temporary / "outcome.json").write_text(json.dumps(vars(outcome)))
            os.rename(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return outcome

    def _documents(self, piece: Piece, outcome: _Outcome) -> Iterator[tuple[Side, Document]]:
        for document in self.source.read(piece):
            if isinstance(document.content, DocumentError):
                outcome.fault(document, document.content)
                _check_bad(outcome, self.max_bad_documents)
            elif not document.content:
                outcome.empty += 1
            else:
                for side, content in self.split.sides(document.content):
                    yield side, document._replace(content=content)

    def _encode_batch(self, batch: list[tuple[Side, Document]], outcome: _Outcome) -> Iterator[tuple[Side, Encoded]]:
        try:
            encoded = self.encoder([document.content for _, document in batch])
        except DocumentError as fault:
            if len(batch) == 1:
                outcome.fault(batch[0][1], fault)
                return
            for item in batch:
                yield from self._encode_batch([item], outcome)
            return
        for (side, _), result in zip(batch, encoded, strict=True):
            yield side, result


def _encode(
    job: _Job, pieces: list[Piece], folder: Path, num_workers: int | None, show: bool
) -> tuple[list[_Outcome], int]:
    """Encode the pieces that are not there yet. Returns what became of all, and how many were there."""
    names = job.piece_names(pieces)
    folder.mkdir(exist_ok=True)
    for name in {path.name for path in folder.iterdir()} - set(names):
        shutil.rmtree(folder / name)  # of inputs as they were, or of a killed process
    outcomes: dict[str, _Outcome] = {}
    todo: list[tuple[Piece, Path]] = []
    for piece, name in zip(pieces, names, strict=True):
        try:
            outcomes[name] = _Outcome(**json.loads((folder / name / "outcome.json").read_text()))
        except FileNotFoundError:
            todo.append((piece, folder / name))
    resumed, known = len(outcomes), _Outcome()
    for outcome in outcomes.values():
        known.add(outcome)
    _check_bad(known, job.max_bad_documents)
    total = sum(piece.size for piece in pieces)
    with show_progress(f"preparing {job.source.name}", total, shown=show) as progress:
        progress.advance(total - sum(piece.size for piece, _ in todo))
        if num_workers is None:
            num_workers = _cores() if sum(piece.size for piece, _ in todo) > _SMALL else 0
        for piece, path, outcome in _encoded(job, todo, min(num_workers, len(todo))):
            outcomes[path.name] = outcome
            progress.advance(piece.size)
            known.add(outcome)
            _check_bad(known, job.max_bad_documents)
    return [outcomes[name] for name in names], resumed


def _encoded(job: _Job, todo: list[tuple[Piece, Path]], num_workers: int) -> Iterator[tuple[Piece, Path, _Outcome]]:
    """Each piece as it is finished."""
    if num_workers < 2:
        for piece, path in todo:
            outcome = job.encode(piece, path, lambda: False)
            assert outcome is not None
            yield piece, path, outcome
        return
    # Tokenizers and torch have threads, which a fork of this process would not survive. A server that has only imported
    # this module has none: its children start at once, and share what they import.
    context = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
    context.set_forkserver_preload([__name__])
    stop = context.Event()
    waiting = iter(todo)
    with ProcessPoolExecutor(num_workers, context, _start_worker, (job, stop)) as pool:
        try:
            running: dict[Future[_Outcome | None], tuple[Piece, Path]] = {}
            while True:
                for item in islice(waiting, 2 * num_workers - len(running)):
                    running[pool.submit(_work, *item)] = item
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    piece, path = running.pop(future)
                    outcome = future.result()
                    assert outcome is not None
                    yield piece, path, outcome
        except BrokenProcessPool as error:
            raise UserError(
                "a process of the preparation has ended: killed for want of memory (set data.prepare_workers lower), "
                f"or never begun ({_UNGUARDED})"
            ) from error
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


_worker_job: _Job
_worker_stop: Any


def _start_worker(job: _Job, stop: Any) -> None:
    """Once in each worker process: keep the job, and end when the parent does, even when it is killed."""
    global _worker_job, _worker_stop
    _worker_job, _worker_stop = job, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent has it too, and stops the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    parent = parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _work(piece: Piece, path: Path) -> _Outcome | None:
    return _worker_job.encode(piece, path, _worker_stop.is_set)


def _split(file: Path, source: Source, pieces: list[Piece], val_fraction: float, max_bad_documents: int) -> Split:
    """The split, kept in ``file`` for a later process."""
    if file.exists():
        split = json.loads(file.read_text())
        return Split(**(split | {"lent": split["lent"] and tuple(split["lent"])}))
    outcome = _Outcome()
    contents = _contents(source, pieces, outcome)
    first = next(contents, None)
    if first is None:
        _check_bad(outcome, max_bad_documents)
        raise UserError(f"{source.name} is empty: there is no text in it; set data.path to a file with text")
    split = choose_split(chain([first], contents), val_fraction)
    _write_json(file, asdict(split))
    return split


def _contents(source: Source, pieces: Iterable[Piece], outcome: _Outcome) -> Iterator[Any]:
    for piece in pieces:
        for document in source.read(piece):
            if isinstance(document.content, DocumentError):
                outcome.fault(document, document.content)
            elif document.content:
                yield document.content


def _trained(folder: Path, source: Source, pieces: list[Piece], split: Split, encoder: UntrainedEncoder) -> Encoder:
    """The encoder, trained on a sample: the first training documents of each piece, in proportion to its size.

    The tokenizer is kept in ``folder`` for a later process.
    """
    if not folder.exists():
        total = max(1, sum(piece.size for piece in pieces))
        sample: list[Any] = []
        for piece in pieces:
            share = SAMPLE_CHARACTERS * piece.size // total
            for content in _contents(source, [piece], _Outcome()):
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


def _batches(documents: Iterable[tuple[Side, Document]]) -> Iterator[list[tuple[Side, Document]]]:
    batch: list[tuple[Side, Document]] = []
    characters = 0
    for side, document in documents:
        batch.append((side, document))
        content = document.content
        characters += len(content) if isinstance(content, str) else len(str(content))
        if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _check_bad(outcome: _Outcome, limit: int) -> None:
    if outcome.bad > limit:
        count = "a document is" if outcome.bad == 1 else f"{outcome.bad} documents or more are"
        kinds = {fault.split(": ", 1)[-1]: fault for fault in reversed(outcome.faults)}  # the first of each
        raise UserError(
            f"{count} bad, and data.max_bad_documents={limit}: {'; '.join([*kinds.values()][::-1][:3])}. "
            "Mend or remove what is bad, or set data.max_bad_documents to how many may be left out"
        )


def write_report(folder: Path, report: Report) -> None:
    (folder / _REPORT).write_text(json.dumps(asdict(report), indent=1))


def read_report(folder: Path) -> Report:
    """Of a prepared folder, wherever it lies now."""
    return replace(Report(**json.loads((folder / _REPORT).read_text())), folder=str(folder))


def _cached(folder: Path, max_bad_documents: int) -> Report:
    report = replace(read_report(folder), cached=True)
    _check_bad(_Outcome(bad=report.skipped["bad"], faults=report.bad), max_bad_documents)
    return report


def _has_pieces(work: Path) -> bool:
    return any((work / "pieces").glob("*/outcome.json"))


@contextmanager
def full_disk_said(cache_dir: Path) -> Iterator[None]:
    """What the block raises because there is no room becomes a :class:`UserError`."""
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


def _by_split(counts: dict[str, int]) -> str:
    return f"{counts['train']:,} to train on, {counts['val']:,} held out"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
