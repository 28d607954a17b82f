"""Scores of a token whose bits depend on nothing but its own row: ``invariant=True``."""
