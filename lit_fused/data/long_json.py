"""Read the text of a very long JSON line in parts, so that the line is never in memory and several processes share it.

An :func:`outline` of the line, in which its long strings are replaced, is parsed in place of the line. It tells which
string is the text. Each process then finds borders in that string's bytes on its own, where no escape sequence and no
character of UTF-8 is cut.
"""

import json
import re
from functools import lru_cache
from typing import BinaryIO, NamedTuple

LONG_LINE = 2**22  # bytes, after which the text of a line is cut
_LONG_STRING = 2**16  # bytes, after which a string is left out of the outline
_BLOCK = 2**20
_INSIDE = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)  # up to the quote that ends a string
_LOOK_BEHIND = 8  # bytes before a border that tell whether it is inside of an escape sequence
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


def line_start(stream: BinaryIO, position: int) -> int:
    """Return where the line of byte ``position - 1`` begins; ``position`` itself if that byte ends a line."""
    while position > 0:
        start = max(0, position - _BLOCK)
        stream.seek(start)
        found = stream.read(position - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        position = start
    return 0


def next_line(stream: BinaryIO, position: int) -> int:
    """Return where the first line begins at or after byte ``position``."""
    stream.seek(position - 1)
    while (block := stream.readline(_BLOCK)) and not block.endswith(b"\n"):
        pass
    return stream.tell()


@lru_cache(maxsize=1)  # each piece of the file asks for it
def outline(file: str, start: int, version: tuple[int, int]) -> Outline:
    """Return the outline of the line that begins at byte ``start`` of a file, whose ``version`` tells changes."""
    line, strings = bytearray(), {}
    opened = kept = -1  # where the string begins that is being read, in the file and in the outline
    position, rest = start, b""  # ``rest`` is the backslash that ended the block before
    with open(file, "rb") as stream:
        stream.seek(start)
        block = b""
        while not block.endswith(b"\n") and (more := stream.readline(_BLOCK)):
            block, position, at = rest + more, position - len(rest), 0
            rest = b""
            while at < len(block):
                before = at
                if opened < 0:
                    at = block.find(b'"', at) + 1 or len(block)
                    line += block[before:at]
                    if line.endswith(b'"'):
                        opened, kept = position + at, len(line)
                    continue
                match = _INSIDE.match(block, at)
                assert match is not None
                at, length = match.end(), position + match.end() - opened
                if length <= _LONG_STRING:
                    line += block[before:at]
                else:
                    del line[kept:]
                if block[at : at + 1] == b'"':
                    if length > _LONG_STRING:
                        name = f"a string from byte {opened}"
                        line += name.encode()
                        strings[name] = opened, position + at
                    line += b'"'
                    opened, at = -1, at + 1
                else:
                    rest, at = block[at:], len(block)
            position += len(block)
        return Outline(bytes(line + rest), strings, position)


def text_border(stream: BinaryIO, string: tuple[int, int], nominal: int, reach: int) -> int:
    """Return where a part of a string may end: with the first line that ends at or after byte ``nominal`` and within
    ``reach`` bytes, or else with a character."""
    start, stop = string
    while start < nominal < stop:
        before = max(start, nominal - _LOOK_BEHIND + 1) - 1  # the quote before a string is no backslash
        stream.seek(before)
        window = stream.read(min(nominal + reach, stop) - before)
        found = _LINE_END.search(window, nominal - before) or _CHARACTER.search(window, nominal - before)
        if found is not None:
            return before + found.end()
        nominal += reach
    return max(start, min(nominal, stop))


def as_line(column: str, content: bytes) -> bytes:
    """Return a JSON object whose ``column`` is a string that is written as ``content``."""
    return b'{%b: "%b"}' % (json.dumps(column).encode(), content)
