"""The report of a sweep: its runs side by side as a table, a picture and a page.

``sweep`` reads the folder of a sweep and makes its tables and its picture, ``page`` an HTML file, also of one run;
``files`` writes ``report.md``, ``report.csv``, ``report.html`` and ``report.png``; ``hydra_callback`` does so while a
``--multirun`` goes on. ``run`` has what a run itself leaves for them.
"""

from lit_fused.reporting.files import write_report
from lit_fused.reporting.page import html_page
from lit_fused.reporting.sweep import Run, csv_table, markdown_table, read_runs, sweep_figure

__all__ = ["Run", "csv_table", "html_page", "markdown_table", "read_runs", "sweep_figure", "write_report"]
