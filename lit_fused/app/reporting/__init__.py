"""Report a sweep: its runs side by side in a table, a picture and a page.

``run`` writes the files of a run, which the others read. ``sweep`` makes tables, ``plots`` the picture, and ``page`` an
HTML file, also of one run. ``files`` writes all of them, and ``hydra_callback`` calls it during a ``--multirun``.
"""
