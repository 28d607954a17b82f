"""The interface of a source of documents: pieces that can each be read alone, in any order and by any process.

A source lists its pieces by names, sizes and times of change, and opens no file: the next run checks them quickly.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias

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
    """A part of the inputs that is read alone."""

    size: int  # in the source's units (bytes, documents), for progress; the tokenizer's sample takes a share of each
    fingerprint: Any  # JSON that identifies the part and the version of its content
    payload: Any  # The source needs it to read; picklable.


class Source:
    """Documents in pieces. Picklable. A subclass defines ``identity``, ``pieces`` and ``read``.

    Attributes:
        kind: Begins the names of the cache's folders; None leaves that to the encoding.
        name: The path or the name of the data set, for messages.
        column, columns: What :meth:`select` was given.
    """

    kind: str | None = None
    name: str
    column: str | None = "text"
    columns: list[str] | None = None
    own_column: str | None = None  # This source alone has it, if several have one encoding.

    def select(self, text_column: str | None, columns: Sequence[str] = ()) -> Self:
        """Return this source with an encoding's choice: ``text_column`` is the field that is the document, or None for
        the whole record, of which ``columns`` are used."""
        selected = copy(self)
        selected.column = text_column and (self.own_column or text_column)
        selected.columns = list(columns) or None
        return selected

    def identity(self) -> Any:
        """Return JSON that says what is read and how, whatever its content is now."""
        raise NotImplementedError

    def pieces(self) -> list[Piece]:
        """Return all pieces in order. Every start calls this, so it must be cheap."""
        raise NotImplementedError

    def read(self, piece: Piece) -> Iterator[Document]:
        """Yield the documents of a piece."""
        raise NotImplementedError


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


def no_column(column: str, names: Iterable[str], options: str = "data.text_column") -> str:
    """Return the sentence for a column that is missing; ``options`` choose it."""
    there = ", ".join(map(repr, names)) or "none"
    return f"there is no column {column!r}; those that are there: {there}. Set {options} to one of them"
