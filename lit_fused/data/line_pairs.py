"""Make pairs for encoder-decoders from the lines of a text: a toy task that needs no download."""

import hashlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lit_fused.data.file_source import FileSource
from lit_fused.data.source import Document, DocumentError, Piece, Source
from lit_fused.errors import UserError, check_whole, checked_options

_WORD_OR_SIGNS = re.compile(r"\w+|[^\w\s]+")
_PROBE = "one ( two ) 3"  # Its answer tells functions of one name apart.


def reverse_words(text: str) -> str:
    """Return the words in the opposite order: "return a + b" -> "b + a return"."""
    return " ".join(reversed(text.split()))


class LinePairs(Source):
    """Records ``{"source", "target"}``: the words and signs of a line, one space between them, and a function of that.

    Every source occurs once. All are one piece, in the order of their SHA-256, and are held in memory.

    Args:
        path, encoding, max_bytes: See :class:`~lit_fused.data.FileSource`.
        answer: A function of the source, a string, that returns the target.
        min_words, max_words: Shorter and longer lines are left out. Signs between words count as words.
        max_characters: Longer sources are left out; one long sequence pads its whole batch.
    """

    @checked_options("data.", min_words=1, max_words=1, max_characters=1)
    def __init__(
        self,
        path: str | Path | None = None,
        answer: Callable[[str], str] = reverse_words,
        min_words: int = 3,
        max_words: int = 8,
        max_characters: int = 40,
        encoding: str = "utf-8",
        max_bytes: int | None = None,
    ) -> None:
        check_whole("data.max_words", max_words, min_words)
        self.text, self.answer = FileSource(path, encoding, max_bytes), answer
        self.name = self.text.name
        self.min_words, self.max_words, self.max_characters = min_words, max_words, max_characters

    def identity(self) -> Any:
        answer = getattr(self.answer, "func", self.answer)  # Hydra gives functions as partials
        name = getattr(answer, "__qualname__", type(answer).__qualname__)
        limits = [self.min_words, self.max_words, self.max_characters]
        return ["lines", self.text.identity(), name, self.answer(_PROBE), *limits]

    def pieces(self) -> list[Piece]:
        pieces = self.text.pieces()
        return [Piece(sum(piece.size for piece in pieces), [piece.fingerprint for piece in pieces], pieces)]

    def read(self, piece: Piece) -> Iterator[Document]:
        sources: set[str] = set()
        for document in (document for part in piece.payload for document in self.text.read(part)):
            if isinstance(document.content, DocumentError):
                yield document
            else:
                sources.update(self._sources(str(document.content)))
        if len(sources) < 2:
            raise UserError(
                f"two lines of {self.min_words} to {self.max_words} words and at most {self.max_characters} characters "
                f"are needed, one to train on and one to hold out, but {self.name} has {len(sources)}; change "
                "data.min_words, data.max_words or data.max_characters, or give a longer text"
            )
        for source in sorted(sources, key=lambda text: hashlib.sha256(text.encode()).digest()):
            where = f"{self.name}, the line {source!r}"
            yield Document({"source": source, "target": self.answer(source)}, partial(str, where))

    def _sources(self, text: str) -> Iterator[str]:
        for words in map(_WORD_OR_SIGNS.findall, text.splitlines()):
            source = " ".join(words)
            if self.min_words <= len(words) <= self.max_words and len(source) <= self.max_characters:
                yield source
