"""Write ``metrics.csv`` as Lightning does, but go on with the file of a run that is resumed in its folder."""

import csv
import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only

from lit_fused.app.run_folder import write_whole
from lit_fused.checkpoints.whole_or_not import WRITING


class RunCSVLogger(CSVLogger):
    """Lightning's ``CSVLogger``, which deletes a file that exists, without doing so."""

    def __init__(self, save_dir: str | Path) -> None:
        super().__init__(save_dir, name="", version="")

    @property
    @rank_zero_experiment
    def experiment(self) -> "_Writer":
        if self._experiment is None:
            os.makedirs(self.save_dir, exist_ok=True)
            self._experiment = _Writer(self.log_dir)
        assert isinstance(self._experiment, _Writer)
        return self._experiment

    @rank_zero_only
    def keep(self, wanted: Callable[[dict[str, str]], bool], last: Mapping[str, float] | None = None) -> None:
        """Keep of the file's whole rows the wanted ones, and write below them from now on.

        ``last`` is a row that is added if the file lacks it: a run may have been killed before it was written.
        """
        self.experiment.rewrite(wanted, last or {})


class _Writer(ExperimentWriter):
    def _check_log_dir_exists(self) -> None:
        pass  # Lightning deletes the file here

    def save(self) -> None:
        try:
            super().save()
        except OSError as error:
            error.add_note(f"{WRITING}{self.metrics_file_path}")
            raise

    def rewrite(self, wanted: Callable[[dict[str, str]], bool], last: Mapping[str, float]) -> None:
        path = Path(self.metrics_file_path)
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            rows = csv.DictReader(line for line in lines if line.endswith("\n"))  # a kill may have cut the last one off
            whole = [row for row in rows if None not in row.values()]
            kept: list[dict[str, Any]] = [row for row in whole if wanted(row)]
            names = last.keys() - {"step", "epoch"}
            if names and not any(row["step"] == str(last["step"]) and any(map(row.get, names)) for row in kept):
                kept.append(dict(last))
            self.metrics_keys = list(dict.fromkeys([*(rows.fieldnames or ()), *last]))
            self._write(kept, self.metrics_keys)

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        with open(self.metrics_file_path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        self._write(rows, fieldnames)

    def _write(self, rows: list[dict[str, Any]], fieldnames: list[str]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames)
        writer.writeheader()
        writer.writerows(rows)
        write_whole(Path(self.metrics_file_path), text.getvalue().encode())
