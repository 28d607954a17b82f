"""Find the character encoding of a file where its first bytes tell it, and suggest one for an error message."""

import codecs
from typing import BinaryIO

_MARKS = {  # UTF-32's little-endian mark begins with UTF-16's
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_SAMPLE = 2**14  # bytes


def marked_encoding(stream: BinaryIO) -> str | None:
    """Return "utf-16" or "utf-32" if a byte order mark tells it, else None. UnicodeError for UTF-16 without a mark,
    whose bytes are valid UTF-8 with a null behind each letter."""
    head = stream.read(_SAMPLE)
    for mark, encoding in _MARKS.items():
        if head.startswith(mark):
            return encoding
    for offset, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
        if len(head) > 1 and 2 * head[offset::2].count(0) > len(head[offset::2]) and 0 not in head[1 - offset :: 2]:
            raise UnicodeError(f"every other byte is null, so it is {encoding}")
    return None


def suggestion(error: UnicodeError) -> str:
    """Return which encoding fits, and what the text would be in it; empty if none does."""
    if not isinstance(error, UnicodeDecodeError):
        return ""
    from charset_normalizer import from_bytes  # here, because few files need it

    start = max(error.start - _SAMPLE // 2, 0)
    found = from_bytes(error.object[start : start + _SAMPLE]).best()
    if found is None or found.encoding.startswith("utf"):
        return ""
    before = error.object[max(error.start - 20, 0) : error.start + 20].decode(found.encoding, errors="replace")
    return f", perhaps {found.encoding}, in which it reads {before!r}"
