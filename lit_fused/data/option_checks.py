"""Check constructor arguments, so that a wrong value is refused before anything heavy starts."""

import os
import stat
from pathlib import Path

from lit_fused.errors import UserError


def check_ints(minimum: int, **options: object) -> None:
    """Raise ``UserError`` unless each option's value is an ``int`` of at least ``minimum``."""
    for name, value in options.items():
        if type(value) is not int or value < minimum:
            raise UserError(f"data.{name} must be a whole number, {minimum} or more; got {value!r}")


def check_fraction(name: str, value: object, *, zero_allowed: bool = False) -> None:
    """Raise ``UserError`` unless ``value`` is a number above 0 (or 0, where allowed) and below 1."""
    if not isinstance(value, (int, float)) or not (0 < value < 1 or (zero_allowed and value == 0)):
        raise UserError(f"{name} must be {'0 or ' if zero_allowed else ''}between 0 and 1, exclusive; got {value!r}")


def stat_of_file(file: Path) -> os.stat_result:
    """Return the status of a file. ``UserError``: there is none, or reading it might never end (a pipe, a device)."""
    try:
        status = file.stat()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; mend it or leave it out of data.path") from error
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{file} is no regular file but a folder, pipe, socket or device; give a file of its content")
    return status
