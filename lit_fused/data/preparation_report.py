"""Report what a preparation did, for a person and for the next run, and show its progress."""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from lit_fused.data.source import Document, DocumentError
from lit_fused.data.store import damaged
from lit_fused.errors import UserError

_REPORT = "report.json"
_NAMED = 10  # bad documents
_SECONDS_BETWEEN_LINES = 10


@dataclass
class Outcome:
    """Counts what became of the documents of a piece, or of all."""

    skipped: dict[str, int] = field(default_factory=lambda: {"empty": 0, "bad": 0})  # empty: without text or tokens
    bad: list[str] = field(default_factory=list)  # the first bad documents, and what is wrong with each
    notes: dict[str, int] = field(default_factory=dict)  # how often the encoder gave each note

    def add(self, document: Document, fault: DocumentError) -> None:
        """Count a bad document."""
        self.skipped["bad"] += 1
        if len(self.bad) < _NAMED:
            self.bad.append(f"{document.where()}: {fault}")

    def __add__(self, other: "Outcome") -> "Outcome":
        skipped = {why: count + other.skipped[why] for why, count in self.skipped.items()}
        notes = Counter(self.notes) + Counter(other.notes)
        return Outcome(skipped, [*self.bad, *other.bad][:_NAMED], dict(notes))

    def check(self, max_bad_documents: int) -> None:
        """Raise ``UserError`` if more documents are bad than may be."""
        if (bad := self.skipped["bad"]) > max_bad_documents:
            count = "a document is" if bad == 1 else f"{bad} documents or more are"
            kinds = {fault.split(": ", 1)[-1]: fault for fault in reversed(self.bad)}  # the first of each kind
            raise UserError(
                f"{count} bad, and data.max_bad_documents={max_bad_documents}: "
                f"{'; '.join([*kinds.values()][::-1][:3])}. "
                "Mend or remove what is bad, or set data.max_bad_documents to how many may be left out"
            )


@dataclass(kw_only=True)
class Report(Outcome):
    """The result of a preparation."""

    source: str  # the data that were read
    folder: str  # the result's place
    cached: bool = False  # the result was there already, and nothing was done
    documents: dict[str, int] = field(default_factory=dict)  # their number, by split
    tokens: dict[str, int] = field(default_factory=dict)  # their number, by split
    vocab_size: int = 0  # one more than the largest possible token
    seconds: float = 0.0  # the time of this preparation
    pieces: dict[str, int] = field(default_factory=dict)  # in "total", and finished by an earlier run ("resumed")
    parts: list[tuple[str, "Report"]] = field(default_factory=list)  # of several sets, with their names

    def __str__(self) -> str:
        if self.parts:
            sides = ["to train on" if part.documents["train"] else "held out" for _, part in self.parts]
            named = zip(sides, self.parts, strict=True)
            return "\n\n".join(f"{name or side:<12}\n{part}" for side, (name, part) in named)
        skipped = ", ".join(f"{count:,} {what}" for what, count in self.skipped.items() if count) or "none"
        rows = {
            "cached" if self.cached else "prepared": self.source,
            "documents": "{train:,} to train on, {val:,} held out".format(**self.documents),
            "tokens": "{train:,} to train on, {val:,} held out".format(**self.tokens),
            "skipped": "; ".join([skipped, *self.bad]),
            "notes": ", ".join(f"{what}: {count:,}" for what, count in self.notes.items()),
            "vocabulary": f"{self.vocab_size:,} entries",
            "folder": self.folder,
        }
        if not self.cached:
            resumed = f", of which {self.pieces['resumed']} were there" if self.pieces["resumed"] else ""
            rows["time"] = f"{self.seconds:.1f} s, {self.pieces['total']} piece(s){resumed}"
        return "\n".join(f"{name:<12}{value}" for name, value in rows.items() if value)


def joined(names: list[str], reports: list[Report]) -> Report:
    """Return the report of several sets, of which ``str`` shows each."""
    return Report(
        source=" and ".join(report.source for report in reports),
        folder=" ".join(report.folder for report in reports),
        cached=all(report.cached for report in reports),
        tokens={side: sum(report.tokens[side] for report in reports) for side in reports[0].tokens},
        vocab_size=max(report.vocab_size for report in reports),
        parts=[*zip(names, reports, strict=True)],
    )


def write_report(folder: Path, report: Report) -> None:
    """Write the report of a prepared folder into it."""
    (folder / _REPORT).write_text(json.dumps(asdict(report), indent=1))


def read_report(folder: Path, *, cached: bool = False) -> Report:
    """Read the report of a prepared folder, wherever the folder lies now."""
    try:
        report = Report(**json.loads((folder / _REPORT).read_text()))
        str(report)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise damaged(folder, error) from error
    return replace(report, folder=str(folder), cached=report.cached or cached)


@contextmanager
def show_progress(description: str, total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yield ``advance(amount)``, which shows how much of ``total`` is done: a bar on a terminal, else plain lines."""
    if shown and sys.stderr.isatty():
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task(description, total=total)
            yield lambda amount: progress.advance(task, amount)
        return
    done, start = 0, time.monotonic()
    last = start

    def advance(amount: int) -> None:
        nonlocal done, last
        done, now = done + amount, time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            say(f"{description}: {done / max(total, 1):.0%} after {now - start:.0f} s", shown=shown)

    say(description, shown=shown)
    yield advance


def say(what: str, *, shown: bool) -> None:
    """Print a line on the standard error stream at once, if it is to be ``shown``."""
    if shown:
        print(what, file=sys.stderr, flush=True)
