"""Report a sweep: its runs side by side in a table, a picture and a page.

``sweep`` reads the folder of a sweep and makes its tables and its picture; ``page`` makes an HTML file, also of one
run; ``files`` writes ``report.md``, ``report.csv``, ``report.html`` and ``report.png``; ``hydra_callback`` calls it
during a ``--multirun``. ``run`` writes the files of a run that they read.
"""

from lit_fused.app.reporting.files import write_report
from lit_fused.app.reporting.page import html_page
from lit_fused.app.reporting.sweep import Run, csv_table, markdown_table, read_runs, sweep_figure

__all__ = ["Run", "csv_table", "html_page", "markdown_table", "read_runs", "sweep_figure", "write_report"]
