"""A Hydra callback that checks the output folder before anything runs."""

from pathlib import Path
from typing import Any

import hydra.core.utils
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lit_fused.app.faults import one_sentence
from lit_fused.app.ranks import is_first_rank
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
        unfinished_first = sorted(
            filter(lambda run: run.name.isdecimal(), folder.glob("*")), key=lambda run: (run / "summary.json").is_file()
        )
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
