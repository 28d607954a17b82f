"""The files of a report. Each is written whole: jobs that run in parallel each write them, a reader sees whole ones."""

import io
import os
from pathlib import Path

from lit_fused.errors import UserError
from lit_fused.reporting.page import html_page
from lit_fused.reporting.sweep import csv_table, markdown_table, read_run, read_runs, sweep_figure


def write_report(sweep_folder: Path) -> str:
    """Write ``report.md``, ``report.csv``, ``report.html`` and ``report.png`` into the folder; return the table and
    where they are.

    Without matplotlib there is no picture, and a sentence says so in its place.
    """
    runs = read_runs(sweep_folder)
    table = markdown_table(runs)
    page = html_page(runs, f"Sweep {sweep_folder.name}")
    files = {"report.md": b"", "report.csv": csv_table(runs).encode(), "report.html": page.encode()}
    try:
        figure = sweep_figure(runs)
    except UserError as error:
        picture = note = str(error)
    else:
        image = io.BytesIO()
        figure.savefig(image, format="png")
        files["report.png"] = image.getvalue()
        picture, note = "![Peak memory and training loss of each run](report.png)", ""
    files["report.md"] = f"# Sweep {sweep_folder.name}\n\n{table}\n{picture}\n".encode()
    for name, content in files.items():
        write_whole(sweep_folder / name, content)
    return "\n".join([table, *(str(sweep_folder / name) for name in files), *([note] if note else [])])


def write_run_page(folder: Path) -> None:
    """Write ``report.html`` of one run into its folder."""
    write_whole(folder / "report.html", html_page([read_run(folder)], f"Run {folder.name}").encode())


def write_whole(path: Path, content: bytes) -> None:
    """Replace the file in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, path)
