"""The exception for mistakes that a user can correct. ``train.py`` prints only its message, without a traceback."""


class UserError(ValueError):
    """An input, configuration or environment that the user can correct: what was expected, given, and what to do."""
