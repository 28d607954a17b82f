"""Report a sweep: its runs side by side in a table, a picture and a page.

``sweep`` reads the folder of a sweep and makes its tables, ``plots`` its picture; ``page`` makes an HTML file, also of
one run; ``files`` writes them; ``hydra_callback`` calls it during a ``--multirun``. ``run`` writes the files of a run
that they read.
"""
