"""Report what a preparation did, for a person and for the next run."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

_REPORT = "report.json"


@dataclass
class Report:
    """The result of a preparation.

    Attributes:
        source: What was read.
        folder: Where the result lies.
        cached: The result was there already, and nothing was done.
        documents, tokens: Counts by split.
        skipped: Counts of documents that are empty (without text or tokens) and bad.
        bad: The first bad documents, and what is wrong with each.
        notes: How often the encoder gave each note.
        vocab_size: One more than the largest possible token.
        seconds: The time that this preparation took.
        pieces: The number of pieces in total, and of those that an earlier run had finished ("resumed").
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


def write_report(folder: Path, report: Report) -> None:
    """Write the report of a prepared folder into it."""
    (folder / _REPORT).write_text(json.dumps(asdict(report), indent=1))


def read_report(folder: Path, *, cached: bool = False) -> Report:
    """Read the report of a prepared folder, wherever the folder lies now."""
    report = Report(**json.loads((folder / _REPORT).read_text()))
    return replace(report, folder=str(folder), cached=report.cached or cached)


def _by_split(counts: dict[str, int]) -> str:
    return f"{counts['train']:,} to train on, {counts['val']:,} held out"
