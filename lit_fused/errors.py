"""The exception for mistakes that a user can correct, whose message alone ``train.py`` prints, and that of a signal."""

import functools
import inspect
import re
import shlex
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, ParamSpec, TypeVar, get_args

from lit_fused.ops.user_error import UserError, check_number, check_switches, plain_number

_Options = ParamSpec("_Options")
_Result = TypeVar("_Result")
_READ_UNQUOTED = re.compile(r"(?a)[\w/:@%+.-]+( +[\w/:@%+.-]+)*")  # by Hydra, in a value


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise UserError unless ``value`` is a whole number of at least ``least``."""
    check_number(name, value, f"be a whole number, {least} or more", lambda number: number >= least, whole=True)


def checked_options(
    prefix: str = "", /, **least: int
) -> Callable[[Callable[_Options, _Result]], Callable[_Options, _Result]]:
    """Decorate a function: check its options that are annotated as bool, and those that are whole numbers, None where
    the annotation has it, of at least ``least``. It gets these as Python's own. ``prefix`` precedes names in
    messages."""

    def decorate(function: Callable[_Options, _Result]) -> Callable[_Options, _Result]:
        signature = inspect.signature(function)
        parameters = signature.parameters
        hints = {name: parameter.annotation for name, parameter in parameters.items()}

        @functools.wraps(function)
        def checked(*args: _Options.args, **options: _Options.kwargs) -> _Result:
            given = signature.bind_partial(*args, **options)
            check_switches(hints, given.arguments)
            for name in filter(given.arguments.__contains__, least):
                value = given.arguments[name]
                if value is not None or NoneType not in get_args(hints[name]):
                    check_whole(prefix + name, value, least[name])
                    given.arguments[name] = plain_number(value)
            return function(*given.args, **given.kwargs)

        vars(checked)["__signature__"] = signature  # by which Lightning chooses what of a checkpoint is an argument
        return checked

    return decorate


def did_you_mean(word: Any, known: Iterable[Any]) -> str:
    """Return " (did you mean X?)" for the known word that is nearest to a mistyped one; "" if none is near."""
    near = get_close_matches(str(word), [*map(str, known)], n=1, cutoff=0.75)
    return f" (did you mean {near[0]}?)" if near else ""


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise UserError unless ``value`` is one of the ``choices``."""
    known = [*choices]
    if value not in known:
        which = f"{'one of ' * (len(known) > 1)}{', '.join(known)}"
        raise UserError(f"{name} must be {which}, got {value!r}{did_you_mean(value, known)}")


@contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Raise the UserError that names the extra of this package with what cannot be imported."""
    try:
        yield
    except ImportError as error:
        if str(error.name).partition(".")[0] == "lit_fused":  # a mistyped name
            raise
        raise UserError(
            f"{what} needs more than is installed ({error}). Install it with: pip install 'lit-fused[{extra}]'"
        ) from error


@contextmanager
def explained(what: str, advice: str) -> Iterator[None]:
    """Raise the UserError that says ``what`` fails where other code raises an error, of any class, with its first line;
    let a UserError pass."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a model's own code, and libraries, raise what they like
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{what} ({type(error).__name__}: {reason}); {advice}") from error


def resuming(checkpoint: str | Path) -> str:
    """Return the word of a command, as a shell takes it, that resumes from a checkpoint: Hydra reads other characters
    than plain ones in quotes only."""
    path = str(checkpoint)
    if not _READ_UNQUOTED.fullmatch(path):
        path = '"' + re.sub(r'(\\*)"', r'\1\1\\"', path) + '"'
    return shlex.quote(f"ckpt_path={path}")


class Stopped(SystemExit):
    """A signal stopped the run. The exit code is 128 and the signal's number, as in a shell.

    Args:
        number: of the signal.
        where: the end of ``sentence``, which begins "stopped by SIGTERM".
    """

    def __init__(self, number: int, where: str = "") -> None:
        super().__init__(128 + number)
        self.sentence = f"stopped by {signal.Signals(number).name}{where}"
