"""Hold out documents by their content, so that order, names and processes change nothing.

A document is held out if its SHA-256, as a number between 0 and 1, is below the fraction. Copies of a document are thus
all on one side. Where that leaves a side empty, in a small corpus, the longest text lends its tail, cut at a line's
end; of records, the one with the smallest hash is held out.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lit_fused.errors import UserError


@dataclass(frozen=True)
class Split:
    """The rule, for one corpus."""

    fraction: float  # documents whose hash is below it are held out
    moved: str | None = None  # the SHA-256 of the document that goes to the other side, so that neither is empty
    lent: Sequence[Any] | None = None  # the SHA-256 of the text that lends its tail, and the characters it keeps

    def sides(self, content: Any) -> list[tuple[bool, Any]]:
        """Return ``content``, or its two parts, each with whether it is held out."""
        if self.fraction in (0, 1):
            return [(self.fraction == 1, content)]
        sha = document_digest(content)
        if self.lent is not None and sha == self.lent[0]:
            return [(False, content[: self.lent[1]]), (True, content[self.lent[1] :])]
        return [((sha == self.moved) != _below(sha, self.fraction), content)]


def choose_split(contents: Iterable[Any], fraction: float) -> Split:
    """Read ``contents`` until neither side is empty, and return the rule; refuse a single one that cannot be cut."""
    total, num_documents = 0, 0
    sides: set[bool] = set()
    smallest, largest = "g", ""  # greater and less than every digest
    longest: tuple[int, str, Any] = (-1, "", None)
    for content in contents:
        sha = document_digest(content)
        sides.add(_below(sha, fraction))
        if len(sides) == 2:
            return Split(fraction)
        num_documents += 1
        smallest, largest = min(smallest, sha), max(largest, sha)
        total += len(content)
        longest = max(longest, (len(content), sha, content), key=lambda one: one[:2])
    if sides == {True} and smallest < largest:
        return Split(fraction, moved=largest)
    size, sha, text = longest
    if isinstance(text, str) and size > 1:
        kept = size - min(max(1, int(fraction * total)), size - 1)
        line_starts = (text.rfind("\n", 0, kept) + 1, text.find("\n", kept) + 1)
        inside = [start for start in line_starts if 0 < start < size]
        kept = min(inside, key=lambda start: abs(start - kept), default=kept)
        return Split(fraction, lent=(sha, kept), moved=sha if sides == {True} else None)
    if smallest < largest and not isinstance(text, str):
        return Split(fraction, moved=smallest)
    raise UserError(
        f"two different documents are needed, one to train on and one to hold out, but there are {num_documents}, "
        "all the same or of one character; give more"
    )


def document_digest(content: Any) -> str:
    """Return the SHA-256 of a text in UTF-8, or of a record as JSON with sorted keys."""
    if not isinstance(content, str):
        content = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def _below(sha: str, fraction: float) -> bool:
    return int(sha[:13], 16) < fraction * 16**13  # 52 bits: exact in a float
