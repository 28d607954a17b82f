"""The approximate backward of ``filter_eps``: it builds on the exact paths, which do not import it."""
