"""Two Hydra callbacks: the sweep's report, and a check of the output folder before anything runs.

If a job of a sweep raises, Hydra runs the others and then raises without calling ``on_multirun_end``; so does Ctrl-C.
Therefore the report is written after every job, and shown at the latest when the process ends.
"""

import atexit
import tempfile
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from lit_fused.app.reporting.files import write_report
from lit_fused.app.reporting.sweep import read_runs


class SweepReport(Callback):
    """Writes the report's files into the sweep's folder, and prints the table at its end."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        atexit.register(self._finish, _folder(config, "sweep"))

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if config.hydra.mode == RunMode.MULTIRUN:
            write_report(_folder(config, "sweep"))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        atexit.unregister(self._finish)
        self._finish(_folder(config, "sweep"))

    def _finish(self, sweep_folder: Path) -> None:
        if read_runs(sweep_folder):  # empty if the sweep ended before its first job
            print(f"\n{write_report(sweep_folder)}", flush=True)


class OutputFolderCheck(Callback):
    """Ends the program with one sentence, before any work, if the output folder cannot be written: by ``SystemExit``,
    because Hydra turns any ``Exception`` of a callback into a warning."""

    def on_run_start(self, config: DictConfig, kind: str = "run", **kwargs: Any) -> None:
        folder = _folder(config, kind)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise SystemExit(
                f"The output folder {folder} cannot be written ({error.strerror}). "
                f"Choose another one with hydra.{kind}.dir=FOLDER"
            ) from None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self.on_run_start(config, "sweep")


def _folder(config: DictConfig, kind: str) -> Path:
    return Path(config.hydra.runtime.cwd, config.hydra[kind].dir)  # a job may have changed the working directory
