"""The report of a sweep: its runs side by side as a table and a picture.

``sweep`` reads the folder of a sweep and writes ``report.md``, ``report.csv`` and ``report.png`` into it;
``hydra_callback`` does so while a ``--multirun`` goes on.
"""

from lit_fused.reporting.sweep import Run, csv_table, markdown_table, read_runs, sweep_figure, write_report

__all__ = ["Run", "csv_table", "markdown_table", "read_runs", "sweep_figure", "write_report"]
