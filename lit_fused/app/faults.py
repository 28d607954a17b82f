"""Say in a sentence what around a run has failed: a disk, a file, a port. No trace helps a person with these."""

import errno
import os
import re

from lit_fused.checkpoints.whole_or_not import WRITING

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_MAKE_ROOM = "make room (or raise the limit), or choose another folder, and run again"
_NUMBER = re.compile(r"(?:os error |\[Errno )(\d+)")  # in the words of Rust and of Python
_TORCH = re.compile(r"inline_container|PytorchStreamWriter|File (\S+) cannot be opened|Parent directory (\S+) does not")


def fault_of(error: BaseException | None) -> str | None:
    """Return the sentence for an error, or for what caused it, if it is a fault of something outside."""
    if error is None:
        return None
    return _sentence(error) or fault_of(error.__cause__ or (None if error.__suppress_context__ else error.__context__))


def _sentence(error: BaseException) -> str | None:
    text, path = str(error), getattr(error, "filename", None)
    if not isinstance(error, Exception):
        return None
    if "EADDRINUSE" in text or getattr(error, "errno", None) == errno.EADDRINUSE:
        port = os.environ.get("MASTER_PORT")
        return f"MASTER_PORT={port} is in use by another program; set it to a free port, or leave it unset"
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (found := _NUMBER.search(text)):
        number = int(found[1])
    note = next((note for note in getattr(error, "__notes__", ()) if note.startswith(WRITING)), None)
    what = str(path or (note or "a file").removeprefix(WRITING))
    if number is not None and number in _FULL:
        return f"the disk is full: {what} could not be written whole ({os.strerror(number)}); {_MAKE_ROOM}"
    if number is not None and (path is not None or number == errno.EIO):
        return f"{what} cannot be read or written ({os.strerror(number)}); see to it, or choose another folder"
    if isinstance(error, RuntimeError) and (found := _TORCH.search(text)):
        what = next(filter(None, found.groups()), what)
        return f"{what} could not be written whole: the disk is full, or its folder cannot be written; {_MAKE_ROOM}"
    return None
