"""Encode the pieces of a source: in one process or several, each piece into a folder of its own.

A piece's folder gets its final name by one rename when it is finished. A killed preparation thus leaves whole pieces,
and the next run encodes only the others.
"""

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_all_start_methods, get_context, parent_process
from pathlib import Path
from typing import Any

from lit_fused.atomic import written_whole
from lit_fused.data.cache import digest
from lit_fused.data.encoding import Encoder, batches
from lit_fused.data.preparation_report import Outcome, show_progress
from lit_fused.data.source import Document, DocumentError, Piece, Source
from lit_fused.data.split import SIDES, Side, Split
from lit_fused.data.store import Encoded, TokenWriter
from lit_fused.errors import UserError

UNGUARDED = 'a script that starts processes must do its work below `if __name__ == "__main__":`'
_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 256, 2**20
_VERSION = 3  # raise it when a piece holds other documents; prepared data stay, and what a kill left is made anew
SMALL = 2**26  # bytes; starting processes for less takes longer than it saves


@dataclass(frozen=True)
class PieceJob:
    """The objects that encode every piece."""

    source: Source
    encoder: Encoder[Any]
    split: Split
    vocab_size: int
    max_bad_documents: int

    def piece_names(self, pieces: list[Piece]) -> list[str]:
        """Return the name of each piece's folder, a hash of all that decides its content."""
        parameters = digest(encoder=self.encoder.fingerprint(), split=asdict(self.split), version=_VERSION)
        return [digest(piece=piece.fingerprint, parameters=parameters) for piece in pieces]

    def encode(self, piece: Piece, folder: Path, stopped: Callable[[], bool]) -> Outcome:
        """Make the piece's folder; raise ``InterruptedError`` if ``stopped`` comes true meanwhile."""
        outcome = Outcome()
        with written_whole(folder) as partial:
            with ExitStack() as stack:
                writers = {side: stack.enter_context(TokenWriter(partial / side, self.vocab_size)) for side in SIDES}
                documents = self._documents(piece, outcome)
                for batch in batches(documents, _characters, _BATCH_CHARACTERS, _BATCH_DOCUMENTS):
                    if stopped():
                        raise InterruptedError
                    for side, encoded in self._encode_batch(batch, outcome):
                        for note in encoded.notes:
                            outcome.notes[note] = outcome.notes.get(note, 0) + 1
                        outcome.skipped["empty"] += not len(encoded.tokens)
                        writers[side].append(encoded)
                    outcome.check(self.max_bad_documents)
            (partial / "outcome.json").write_text(json.dumps(vars(outcome)))
        return outcome

    def _documents(self, piece: Piece, outcome: Outcome) -> Iterator[tuple[Side, Document]]:
        for document in self.source.read(piece):
            if isinstance(document.content, DocumentError):
                outcome.add(document, document.content)
                outcome.check(self.max_bad_documents)
            elif not document.content:
                outcome.skipped["empty"] += 1
            else:
                for side, content in self.split.sides(document.content):
                    yield side, document._replace(content=content)

    def _encode_batch(self, batch: list[tuple[Side, Document]], outcome: Outcome) -> Iterator[tuple[Side, Encoded]]:
        try:
            encoded = self.encoder([document.content for _, document in batch])
        except DocumentError as fault:
            if len(batch) == 1:
                outcome.add(batch[0][1], fault)
            else:
                for item in batch:
                    yield from self._encode_batch([item], outcome)
            return
        for (side, _), result in zip(batch, encoded, strict=True):
            yield side, result


def encode_pieces(
    job: PieceJob, pieces: list[Piece], folder: Path, num_workers: int | None, show: bool
) -> tuple[Outcome, int]:
    """Encode the pieces that ``folder`` lacks. Return what became of all, and how many were there."""
    names = job.piece_names(pieces)
    folder.mkdir(exist_ok=True)
    for name in {path.name for path in folder.iterdir()} - set(names):
        shutil.rmtree(folder / name)  # made from other inputs, or left by a killed process
    there = [name for name in names if (folder / name).exists()]
    outcomes = {name: Outcome(**json.loads((folder / name / "outcome.json").read_text())) for name in there}
    todo = [(piece, folder / name) for piece, name in zip(pieces, names, strict=True) if name not in outcomes]
    resumed, known = len(outcomes), sum(outcomes.values(), Outcome())
    known.check(job.max_bad_documents)
    total, left = (sum(piece.size for piece in some) for some in (pieces, [piece for piece, _ in todo]))
    with show_progress(f"preparing {job.source.name}", total, shown=show) as advance:
        advance(total - left)
        for piece, path, outcome in _encoded(job, todo, min(workers_for(left, num_workers), len(todo))):
            outcomes[path.name] = outcome
            advance(piece.size)
            known += outcome
            known.check(job.max_bad_documents)
    return sum((outcomes[name] for name in names), Outcome()), resumed


def workers_for(size: int, num_workers: int | None) -> int:
    """Return how many processes work on so many bytes; ``num_workers`` is how many the user wants."""
    if num_workers is not None:
        return num_workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if size > SMALL else 0


def _encoded(job: PieceJob, todo: list[tuple[Piece, Path]], num_workers: int) -> Iterator[tuple[Piece, Path, Outcome]]:
    if num_workers < 2:
        for piece, path in todo:
            yield piece, path, job.encode(piece, path, lambda: False)
        return
    with worker_pool(num_workers, job, job.source, job.encoder, job.encoder.tokenizer) as pool:
        futures = {pool.submit(_work, *item): item for item in todo}
        for future in as_completed(futures):
            yield *futures[future], future.result()


@contextmanager
def worker_pool(num_workers: int, job: PieceJob | None, *used: object) -> Iterator[ProcessPoolExecutor]:
    """Yield processes that have ``job``, and end them; they share the modules of the objects that are ``used``."""
    # Tokenizers and torch have threads, which a fork of this process would not survive. A fork server that has only
    # imported what the job and the script need has none: its children start at once and share what it imported.
    context = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
    modules = map(_module_of, [*used, *vars(sys.modules["__main__"]).values()])
    context.set_forkserver_preload([__name__, *sorted({name for name in modules if name})])
    stop = context.Event()
    with ProcessPoolExecutor(num_workers, context, _start_worker, (job, stop)) as pool:
        try:
            yield pool
        except BrokenProcessPool as error:
            raise UserError(
                "a process of the preparation has ended: killed for want of memory (set data.prepare_workers lower), "
                f"or never begun ({UNGUARDED})"
            ) from error
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _module_of(part: object) -> str | None:
    name = getattr(part if callable(part) else type(part), "__module__", None)
    return name if isinstance(name, str) and name != "__main__" else None


_worker_job: PieceJob | None
_worker_stop: Any


def _start_worker(job: PieceJob | None, stop: Any) -> None:
    """Keep the job in a worker process, and end with the parent, even when it is killed."""
    global _worker_job, _worker_stop
    _worker_job, _worker_stop = job, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and stops the workers
    if job is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    parent = parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _work(piece: Piece, path: Path) -> Outcome:
    assert _worker_job is not None
    return _worker_job.encode(piece, path, _worker_stop.is_set)


def _characters(item: tuple[Side, Document]) -> int:
    content = item[1].content
    return len(content if isinstance(content, str) else str(content))
