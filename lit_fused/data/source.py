"""The interface of a source of documents: pieces that can each be read alone, in any order and by any process.

A source lists its pieces by names, sizes and times of change, without opening a file, so that the next run learns
quickly that nothing has changed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

from lit_fused.errors import UserError

Record: TypeAlias = dict[str, Any]


class DocumentError(UserError):
    """Says what is wrong with one document. The preparation names it and counts it for ``data.max_bad_documents``."""


class Document(NamedTuple):
    """A document, or what is wrong with it; ``where()`` returns its place for a person (``file:line``)."""

    content: str | Record | DocumentError
    where: Callable[[], str]


@dataclass(frozen=True)
class Piece:
    """A part of the inputs that is read alone.

    Attributes:
        size: In the source's units (bytes, documents), for progress; the tokenizer's sample takes a share of each.
        fingerprint: JSON that identifies the part and the version of its content.
        payload: What the source needs to read it; picklable.
    """

    size: int
    fingerprint: Any
    payload: Any


class Source(Protocol):
    """Documents in pieces. Picklable.

    Attributes:
        kind: Begins the names of the cache's folders; None leaves that to the encoding.
    """

    kind: str | None

    @property
    def name(self) -> str:
        """Return the path or the name of the data set, for messages."""
        ...

    def select(self, text_column: str | None, columns: Sequence[str] = ()) -> Self:
        """Return this source with the choice of an encoding.

        Args:
            text_column: A record's field that is the document. None: the whole record is the document.
            columns: The fields of whole records that are used; a source need not read others.
        """
        ...

    def identity(self) -> Any:
        """Return JSON that says what is read and how, whatever its content is now."""
        ...

    def pieces(self) -> list[Piece]:
        """Return all pieces in order. Every start calls this, so it must be cheap."""
        ...

    def read(self, piece: Piece) -> Iterator[Document]:
        """Yield the documents of a piece."""
        ...


def select_content(record: Record, text_column: str | None) -> str | Record | DocumentError:
    """Return the text in a column, or the whole record if the column is None. A text that is None is empty."""
    if text_column is None:
        return record
    if text_column not in record:
        return DocumentError(no_column(text_column, record))
    text = record[text_column]
    if text is None or isinstance(text, str):
        return text or ""
    return DocumentError(f"expected text in {text_column!r}, got {type(text).__name__}")


def no_column(column: str, names: Iterable[str]) -> str:
    """Return the sentence for a column that is missing."""
    there = ", ".join(map(repr, names)) or "none"
    return f"there is no column {column!r}; those that are there: {there}. Set data.text_column to one of them"
