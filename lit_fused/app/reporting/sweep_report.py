"""A Hydra callback that writes a sweep's report while its jobs run, and shows it at the end."""

import atexit
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from lit_fused.app.reporting.page import write_report

_PAUSE = 20  # times as long as a report takes


class SweepReport(Callback):
    """Writes the report's files into the sweep's folder. A run that goes on in its folder of a sweep renews them."""

    _next = 0.0  # the earliest time of the next report; of the class, because each parallel job has a copy of this

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        # Hydra calls on_multirun_end neither after a job that failed nor after Ctrl-C.
        atexit.register(_show, Path(config.hydra.runtime.cwd, config.hydra.sweep.dir))

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        start, folder = time.monotonic(), Path(config.hydra.runtime.cwd, config.hydra.runtime.output_dir)
        if config.hydra.mode == RunMode.RUN and (folder.parent / "multirun.yaml").is_file():
            write_report(folder.parent)
        elif config.hydra.mode == RunMode.MULTIRUN and start >= SweepReport._next:
            write_report(Path(config.hydra.runtime.cwd, config.hydra.sweep.dir))
            SweepReport._next = start + _PAUSE * (time.monotonic() - start)


def _show(sweep: Path) -> None:
    with suppress(KeyboardInterrupt):  # Another Ctrl-C: files that are not written stay as they were.
        if text := write_report(sweep):
            print(f"\n{text}\n\nreport  {sweep / 'report.html'}", flush=True)
