"""Limit what a chat template may take: it is a program, and may come with a model from a stranger."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lit_fused.errors import UserError

_SECONDS = 5  # computing time for one conversation; templates take milliseconds
_BYTES = 2**30  # beyond what the process has


class EndlessTemplateError(UserError):
    """A chat template took more time or memory than one may."""


class _TimeIsUp(BaseException):
    """No template catches it."""


@contextmanager
def limited_template(template: str | None) -> Iterator[None]:
    """Raise ``EndlessTemplateError`` if rendering ``template`` in a block takes long or much memory. Outside of the
    main thread, which alone has signals, and where memory cannot be limited, nothing is."""
    _refuse_powers(template or "")
    try:
        import resource
    except ImportError:
        yield
        return
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        yield
        return

    def stop(*_: Any) -> None:
        raise _TimeIsUp

    handler, limits = signal.signal(signal.SIGVTALRM, stop), resource.getrlimit(resource.RLIMIT_AS)
    size = Path("/proc/self/statm")
    try:
        if size.exists() and limits[0] == resource.RLIM_INFINITY:
            pages = int(size.read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _BYTES, limits[1]))
        signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS)
        yield
    except (_TimeIsUp, MemoryError) as error:
        what = f"{_SECONDS} s" if isinstance(error, _TimeIsUp) else "1 GiB"
        raise EndlessTemplateError(
            f"the chat template takes more than {what} for one conversation: it has loops or texts without end; give "
            "another one, data.chat_template=FILE or chatml"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGVTALRM, handler)


def _refuse_powers(template: str) -> None:
    """Refuse ``**`` in a template: no signal interrupts the computation of a number of a billion digits."""
    import jinja2

    if "**" in template:
        try:
            tokens = [*jinja2.Environment().lex(template)]
        except jinja2.TemplateSyntaxError:
            return  # rendering it says what is wrong
        if any(kind == "operator" and text == "**" for _, kind, text in tokens):
            raise EndlessTemplateError("the chat template computes a power (**), which may take for ever; take it out")
