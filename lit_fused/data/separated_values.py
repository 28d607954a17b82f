"""Read tables of separated values (CSV, TSV): the first row names the columns, and each other row is a record."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from lit_fused.data.source import DocumentError, Record

SEPARATORS = {".csv": ",;\t|", ".tsv": "\t"}  # one of them, chosen by the first row
_LONGEST = 2**31 - 1  # characters of a field; Python's module refuses more than 128 Ki otherwise


def read_table(
    lines: Iterable[str], suffix: str, columns: Sequence[str]
) -> Iterator[tuple[int, Record | DocumentError]]:
    """Yield each row as a record of strings, or what is wrong with it, with the number of its first line.

    Fields are quoted as RFC 4180 has it: they may hold separators, line ends and doubled quotes. The separator is the
    one that gives the first row most of ``columns``, then the one that gives it most names. Blank lines are nothing.
    """
    csv.field_size_limit(_LONGEST)
    lines = iter(lines)
    head = next(lines, "")
    separator = max(SEPARATORS[suffix], key=lambda one: _fit(head, one, columns))
    rows = csv.reader(chain([head], lines), delimiter=separator, strict=True)
    names: list[str] | None = None
    while True:
        number = rows.line_num + 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield number, DocumentError(f"expected a row of separated values, but it cannot be parsed: {error}")
            continue
        if names is None:
            names = row
            if len({*names}) < len(names):
                yield (
                    number,
                    DocumentError(f"expected a name for each column, but some have the same: {', '.join(names)}"),
                )
                return
        elif row and len(row) != len(names):
            yield number, DocumentError(f"expected {len(names)} fields, as the first row has, got {len(row)}")
        elif row:
            yield number, dict(zip(names, row, strict=True))


def _fit(head: str, separator: str, columns: Sequence[str]) -> tuple[int, int]:
    names = next(csv.reader([head], delimiter=separator), [])
    return len({*names} & {*columns}), len(names)
