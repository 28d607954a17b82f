"""Report a sweep: its runs side by side in a table, a picture and a page.

``run`` writes the files of a run, ``sweep`` reads them and makes tables, ``plots`` the picture, and ``page`` an HTML
file and all files of a report, for which ``hydra_callback`` asks during a ``--multirun``.
"""
