"""Check constructor arguments, so that a wrong value is refused before anything heavy starts."""

import math
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_fused.errors import UserError

_NAME = re.compile(r"[\w-]+")


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


def check_names(option: str, names: Any) -> None:
    """Raise UserError unless there are names, and each can be part of a metric's name."""
    wrong = [name for name in names if not _NAME.fullmatch(str(name))]
    if wrong or not names:
        raise UserError(
            f"{option} must be a path, or several with names of letters, digits, - and _, such as "
            f"'{{web: a.jsonl, code: b.jsonl}}'; got {'the name ' + repr(wrong[0]) if wrong else 'none'}"
        )


def check_weights(weights: Any, names: list[str]) -> None:
    """Raise UserError unless ``weights`` has a number of 0 or more for each set, and one above 0."""
    if names == [""]:
        raise UserError(
            f"data.weights={weights} are for several sets, data.path='{{web: a.jsonl, code: b.jsonl}}', and data.path "
            "is one; leave data.weights out, or name the sets"
        )
    given = dict(weights) if isinstance(weights, Mapping) else {}
    right = all(type(number) in (int, float) and 0 <= number < math.inf for number in given.values())
    if not right or {*map(str, given)} != {*names} or not sum(given.values()) > 0:
        raise UserError(
            f"data.weights must be a number of 0 or more for each set of data.path, which has {', '.join(names)}, and "
            f"one of them above 0; got {given or weights}"
        )
