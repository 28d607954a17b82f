"""Two Hydra callbacks: the sweep's report, and a check of the output folder before anything runs.

After a job that raised, and after Ctrl-C, Hydra does not call ``on_multirun_end``. So the report is written while jobs
run, and shown at the latest when the process ends.
"""

import atexit
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra.core.utils
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lit_fused.app.faults import fault_of, one_sentence
from lit_fused.app.ranks import is_first_rank
from lit_fused.app.reporting.page import write_report
from lit_fused.app.reporting.sweep import list_run, numbered_folders, run_folders
from lit_fused.app.run_folder import (
    RESUMED,
    check_nothing_is_replaced,
    fitted,
    give_back,
    results_in,
    take,
    write_whole,
)

_OTHER_RUN = "Choose another one with hydra.run.dir=FOLDER"
_OTHER_SWEEP = "Choose another one with hydra.sweep.dir=FOLDER"
_ALONE = (
    "A run of a sweep goes on alone, without -m and with hydra.run.dir=ITS_FOLDER; for another sweep choose "
    "hydra.sweep.dir=FOLDER"
)
_PAUSE = 20  # times as long as a report takes


class SweepReport(Callback):
    """Writes the report's files into the sweep's folder, the more rarely the longer it takes; at the end, prints it. A
    run that goes on in its folder of a sweep renews that sweep's."""

    _next = 0.0  # the earliest time of the next report; of the class, because each parallel job has a copy of this

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        atexit.register(_at_exit, self._finish, _folder(config, "sweep"))

    @one_sentence()
    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        if not is_first_rank():
            return
        if config.hydra.mode == RunMode.MULTIRUN:
            list_run(_folder(config, "sweep"), Path(config.hydra.runtime.cwd, config.hydra.runtime.output_dir))
            return
        folder = _output_folder(config)
        for parent in folder.parents:
            if (parent / "multirun.yaml").is_file() and folder in run_folders(parent):
                atexit.register(_at_exit, _written, parent)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        start = time.monotonic()
        if config.hydra.mode == RunMode.MULTIRUN and start >= SweepReport._next:
            _written(_folder(config, "sweep"), draw=False)
            end = time.monotonic()
            SweepReport._next = end + _PAUSE * (end - start)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        atexit.unregister(_at_exit)
        self._finish(_folder(config, "sweep"))

    def _finish(self, sweep_folder: Path) -> None:
        for folder in run_folders(sweep_folder):  # Ctrl-C ends a job without a call of on_job_end
            give_back(folder)
        if run_folders(sweep_folder):  # empty if the sweep ended before its first job
            print(f"\n{_written(sweep_folder)}", flush=True)


def _at_exit(finish: Callable[[Path], object], sweep_folder: Path) -> None:
    with suppress(KeyboardInterrupt):  # Another Ctrl-C: files that are not written stay as they were.
        finish(sweep_folder)


def _written(sweep_folder: Path, *, draw: bool = True) -> str:
    """Write the report, and return its table; or what has failed around it, which ends no sweep."""
    try:
        return write_report(sweep_folder, draw=draw)
    except OSError as error:
        return f"there is no new report of {sweep_folder}: {fault_of(error) or error}"


class OutputFolderCheck(Callback):
    """Gives each run its folder, or ends the program by ``SystemExit``: an ``Exception`` would become a warning."""

    @one_sentence()
    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        mode, of_hydra = config.get("mode") or "fit", _folder(config, "run")
        with open_dict(config.hydra.runtime), read_write(config.hydra.runtime):
            config.hydra.runtime.output_dir = str(of_hydra)
        HydraConfig.instance().set_config(config)  # output_dir refers to it
        folder = _output_folder(config)
        with read_write(config), read_write(config.hydra):
            if mode != "fit" and fitted(folder):  # Results of other modes lie below the run's.
                folder /= mode
                if folder.parent == of_hydra:
                    config.hydra.run.dir = str(folder)
                else:
                    config.output_dir = str(folder)
            elif config.hydra.output_subdir and results_in(of_hydra):
                config.hydra.output_subdir = RESUMED
        if is_first_rank():
            for place in {folder, _folder(config, "run")}:
                take(place, _OTHER_RUN)
        if mode == "fit":
            given = config.get("ckpt_path")  # Another value than a text is refused later.
            ckpt_path = Path(config.hydra.runtime.cwd, given) if isinstance(given, str) else None
            check_nothing_is_replaced([folder], ckpt_path, _OTHER_RUN)

    @one_sentence()
    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        folder = _folder(config, "sweep")
        take(folder, _OTHER_SWEEP)
        unfinished_first = sorted(numbered_folders(folder), key=lambda run: (run / "summary.json").is_file())
        check_nothing_is_replaced(unfinished_first, None, _ALONE)

    @one_sentence()
    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        if config.hydra.mode == RunMode.MULTIRUN and is_first_rank():
            take(_output_folder(config), _OTHER_SWEEP)
            check_nothing_is_replaced([_output_folder(config)], None, _OTHER_SWEEP)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        give_back(_output_folder(config))


@one_sentence()
def _save_whole(cfg: DictConfig, filename: str, output_dir: Path) -> None:
    """Take the place of Hydra's function, which it calls before ``on_job_start``."""
    if is_first_rank():  # It also moves and deletes the folder of a run that is resumed.
        if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
            check_nothing_is_replaced([Path(HydraConfig.get().runtime.output_dir)], None, _ALONE)
        output_dir.mkdir(parents=True, exist_ok=True)
        write_whole(output_dir / filename, OmegaConf.to_yaml(cfg).encode())


hydra.core.utils._save_config = _save_whole  # A launcher's workers import this module with a callback, and run no more.


def _folder(config: DictConfig, kind: str) -> Path:
    return Path(config.hydra.runtime.cwd, config.hydra[kind].dir)  # a job may have changed the working directory


def _output_folder(config: DictConfig) -> Path:
    return Path(config.hydra.runtime.cwd, config.get("output_dir") or config.hydra.runtime.output_dir)
