"""Let a run outlive whoever reads what it prints: a pipe that is closed, a terminal that is gone, a full disk."""

import io
import os
import sys
from typing import Any


class _Output(io.FileIO):
    """A descriptor that writes to nowhere from the first time on that it cannot write."""

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            return len(memoryview(content).cast("B"))


def keep_printing() -> None:
    """Replace standard output and error: they take every character, as an escape where their encoding lacks it, and no
    error of writing ends the program."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed before the program began
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (it stays open)
        elif stream is getattr(sys, f"__{name}__"):  # A program, or a test, may have put another one there.
            stream.flush()
            buffer = io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False))
            lines = stream.line_buffering
            setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=lines))
