"""Read the text of a very long JSON line in parts, so that the line is never in memory and several processes share it.

An :func:`outline` of the line, in which its long strings are replaced, is parsed in place of the line. It tells which
string is the text. Each process then finds borders in that string's bytes on its own, where no escape sequence and no
character of UTF-8 is cut. The file is mapped: nothing but the outline and the parts is copied.
"""

import json
import re
from functools import lru_cache
from mmap import ACCESS_READ, mmap
from typing import BinaryIO, NamedTuple

LONG_LINE = 2**22  # bytes, after which the text of a line is cut
_LONG_STRING = 2**16  # bytes, after which a string is left out of the outline
_STRING = re.compile(rb'"((?:[^"\\]++|\\.)*+)"?', re.DOTALL)
_LINE_END = re.compile(rb"(?<=[^\\])(?:\\\\)*\\n")
_CHARACTER = re.compile(  # a look-ahead wants a byte, because the bytes that are searched may end anywhere
    rb"(?<=[^\\]{6})(?=[^\x80-\xbf])"  # behind six bytes without an escape sequence
    rb'|(?<=[^\\])(?:\\\\)*+(?:\\["/bfnrt]|(?<=\\)(?=[^\\\x80-\xbf]))'  # behind one of a single character
    rb"|(?<=[^\\]\\u[0-9a-fA-F]{4})(?=[^\\]|\\[^u]|\\u(?:[^dD]|.[0-9abAB]))"  # behind a number, not in a pair of them
)


class Outline(NamedTuple):
    """A line of a file: JSON with a name in place of each long string, the bytes of those strings, the line's end."""

    line: bytes
    strings: dict[str, tuple[int, int]]
    end: int


def mapped(stream: BinaryIO) -> mmap:
    return mmap(stream.fileno(), 0, access=ACCESS_READ)


@lru_cache(maxsize=1)  # each piece of the file asks for it
def outline(file: str, start: int, version: tuple[int, int]) -> Outline:
    """Return the outline of the line that begins at byte ``start`` of a file, whose ``version`` tells changes."""
    line, strings, position = b"", {}, start
    with open(file, "rb") as stream, mapped(stream) as view:
        end = view.find(b"\n", start) + 1 or len(view)
        for match in _STRING.finditer(view, start, end):
            begin, stop = match.span(1)
            if stop - begin > _LONG_STRING:
                name = f"a string from byte {begin}"
                strings[name] = begin, stop
                line += view[position:begin] + name.encode()
                position = stop
        return Outline(line + view[position:end], strings, end)


def text_border(view: mmap, string: tuple[int, int], nominal: int, reach: int) -> int:
    """Return where a part of a string may end: with a line within ``reach`` of byte ``nominal``, else a character."""
    start, stop = string
    while start < nominal < stop:
        until = min(nominal + reach, stop)
        if found := _LINE_END.search(view, nominal, until) or _CHARACTER.search(view, nominal, until):
            return found.end()
        nominal += reach
    return max(start, min(nominal, stop))


def as_line(column: str, content: bytes) -> bytes:
    """Return a JSON object whose ``column`` is a string that is written as ``content``."""
    return b'{%b: "%b"}' % (json.dumps(column).encode(), content)
