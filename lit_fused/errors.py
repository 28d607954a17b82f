"""The exception for mistakes that a user can correct, whose message alone ``train.py`` prints, and that of a signal."""

import signal


class UserError(ValueError):
    """An input, configuration or environment that the user can correct: what was expected, given, and what to do."""


class Stopped(SystemExit):
    """A signal stopped the run. The exit code is 128 and the signal's number, as in a shell.

    Args:
        number: of the signal.
        where: the end of ``sentence``, which begins "stopped by SIGTERM".
    """

    def __init__(self, number: int, where: str = "") -> None:
        super().__init__(128 + number)
        self.sentence = f"stopped by {signal.Signals(number).name}{where}"
