"""Report a sweep: its runs side by side in a table, a picture and a page.

``run`` writes a run's files, ``sweep`` reads them, ``page`` writes the report, ``hydra_callback`` asks for it."""
