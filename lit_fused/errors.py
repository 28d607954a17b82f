"""The exception for mistakes that a user can correct.

``train.py`` prints only its message, without a traceback. For programs it is a ``ValueError``.
A message says what was expected, what was given, and what to do.
"""


class UserError(ValueError):
    """An input, configuration or environment that the user can correct. The message says how."""
