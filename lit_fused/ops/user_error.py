"""The error for mistakes that a caller can correct, and the checks of numbers and switches that raise it."""

import re
from collections.abc import Callable, Mapping
from typing import Any

_SWITCHES = (bool, bool | None)
# Control characters but tabs and line ends, and those that change the direction of writing.
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class UserError(ValueError):
    """An input, configuration or environment that the user can correct: what was expected, given, and what to do.

    A message may name what a stranger's file has, so it is :func:`printable`."""

    def __str__(self) -> str:
        return printable(super().__str__())


def printable(text: str) -> str:
    """Return a text with escapes, as Python writes them, for the characters that a terminal would obey."""
    return _OBEYED.sub(lambda found: repr(found[0])[1:-1], text)


def check_number(
    name: str, value: Any, words: str, fits: Callable[[Any], bool], hint: str = "", *, whole: bool = False
) -> None:
    """Raise UserError, "``name`` must ``words``", unless ``value`` is a number, or a whole one, that ``fits``.

    A scalar of numpy or torch is a number and a bool is none; NaN fits no comparison."""
    number = plain_number(value)
    if type(number) not in ((int,) if whole else (int, float)) or not fits(number):
        raise UserError(f"{name} must {words}, got {value!r}{hint and f'; {hint}'}")


def plain_number(value: Any) -> Any:
    """Return a scalar of numpy or torch as Python's own, and anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def check_switches(hints: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raise UserError for a value that is neither True nor False though its annotation is bool, "false" for example."""
    for name, value in values.items():
        kind = hints.get(name)
        if kind in _SWITCHES and (value is not None or kind is bool) and not isinstance(plain_number(value), bool):
            raise UserError(f"{name} must be True or False, got {value!r}")
