"""Show the progress of a preparation: a bar on a terminal, a plain line every ten seconds in a file."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10


class Advance(Protocol):
    """A progress that can be advanced, in the units of its total."""

    def advance(self, amount: int) -> None: ...


@contextmanager
def show_progress(description: str, total: int, *, shown: bool) -> Iterator[Advance]:
    """Yield an object whose ``advance(amount)`` shows how much of ``total`` is done, on the standard error stream."""
    if shown and sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        with Progress(*columns, *times, console=Console(stderr=True)) as progress:
            yield _Bar(progress, description, total)
    else:
        yield _Lines(description, total, shown)


class _Bar:
    def __init__(self, progress: Progress, description: str, total: int) -> None:
        self.progress = progress
        self.task = progress.add_task(description, total=total)

    def advance(self, amount: int) -> None:
        self.progress.advance(self.task, amount)


class _Lines:
    def __init__(self, description: str, total: int, shown: bool) -> None:
        self.description, self.total, self.shown = description, max(total, 1), shown
        self.done, self.start, self.last = 0, time.monotonic(), time.monotonic()
        self._say(description)

    def advance(self, amount: int) -> None:
        self.done += amount
        now = time.monotonic()
        if now - self.last >= _SECONDS_BETWEEN_LINES:
            self.last = now
            self._say(f"{self.description}: {self.done / self.total:.0%} after {now - self.start:.0f} s")

    def _say(self, text: str) -> None:
        if self.shown:
            print(text, file=sys.stderr, flush=True)
