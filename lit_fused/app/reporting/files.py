"""Write the files of a report, each in one step, because parallel jobs write the same files while others read them."""

import contextlib
from pathlib import Path

from lit_fused.app.reporting.page import html_page
from lit_fused.app.reporting.plots import png, sweep_figure
from lit_fused.app.reporting.sweep import csv_table, markdown_table, markdown_text, read_run, read_runs
from lit_fused.app.run_folder import write_whole
from lit_fused.errors import Stopped, UserError

_ERROR_LENGTH = 1000  # characters


def write_report(sweep_folder: Path, *, draw: bool = True) -> str:
    """Write ``report.md``, ``report.csv``, ``report.html`` and ``report.png``; return the table and the files' paths.

    Without matplotlib, a sentence about it takes the place of the picture. ``draw=False`` leaves the picture out, which
    takes the most time.
    """
    runs = read_runs(sweep_folder)
    table = markdown_table(runs)
    page = html_page(runs, f"Sweep {sweep_folder.name}")
    files = {"report.md": b"", "report.csv": csv_table(runs).encode(), "report.html": page.encode()}
    picture, notes = "![Peak memory and training loss of each run](report.png)" if draw else "", []
    try:
        if draw:
            files["report.png"] = png(sweep_figure(runs))
    except UserError as error:
        picture = str(error)
        notes = [picture]
    files["report.md"] = f"# Sweep {markdown_text(sweep_folder.name)}\n\n{table}\n{picture}\n".encode()
    for name, content in files.items():
        write_whole(sweep_folder / name, content)
    return "\n".join([table, *(str(sweep_folder / name) for name in files), *notes])


def write_run_page(folder: Path) -> None:
    """Write ``report.html`` of one run into its folder."""
    write_whole(folder / "report.html", html_page([read_run(folder)], f"Run {folder.name}").encode())


def record_failure(path: Path, error: BaseException) -> bool:
    """Write why the run ended, in a sentence; return False if another rank has failed before and has written it."""
    # Lightning turns Ctrl-C into SystemExit.
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
        sentence = "interrupted"
    elif isinstance(error, Stopped):
        sentence = error.sentence
    elif isinstance(error, UserError):
        sentence = str(error)
    else:
        text = " ".join(str(error).split())
        sentence = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if len(sentence) > _ERROR_LENGTH:
        sentence = sentence[:_ERROR_LENGTH] + " ..."
    try:
        with path.open("x") as file:
            file.write(sentence + "\n")
    except FileExistsError:
        return not path.is_file()
    except OSError:  # the disk may be what has failed
        with contextlib.suppress(OSError):
            path.unlink()
    return True
