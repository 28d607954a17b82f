"""The one exception for mistakes that a person can put right.

``train.py`` prints its message alone, without a traceback; to a program it is a ``ValueError``.
A message says what was expected, what came, and what to do.
"""


class UserError(ValueError):
    """Input, configuration or environment that the caller can change. The message says how."""
