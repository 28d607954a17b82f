"""Run what ``mode=`` names: each mode is a function of the composed configuration.

A mode's module is imported when the configuration is right.
"""

import logging
import os
import signal
import sys
import threading
import time
import warnings
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_fused.app.command_line import command_line
from lit_fused.app.config import check_config, leave_mps, refuse_code_of_folders
from lit_fused.app.defaults import default_epochs, open_values
from lit_fused.app.ranks import end_with_parent, is_first_rank
from lit_fused.app.reporting.runs import record_failure
from lit_fused.app.run_folder import claim, is_of_this_job, leave_nothing
from lit_fused.atomic import newest_in
from lit_fused.errors import Stopped, UserError, needing
from lit_fused.ops.user_error import printable

# The module of each mode in this folder. It has a function of the mode's name.
MODES = {
    "fit": "training",
    "validate": "training",
    "test": "training",
    "generate": "generating",
    "chat": "generating",
    "recommend": "recommending",
    "plan": "memory_plan",
    "prepare": "preparing",
    "score": "scoring",
}

# How messages begin that sell a service, repeat the configuration, or are said again when they are done.
_SAID_BY_LIGHTNING = ("💡 Tip: For seamless cloud", "Trainer already configured", "TPU available", "`Trainer(")
_SAID_BY_LIGHTNING += ("`Trainer.fit` stopped", "Restoring states from", "Loading `train_dataloader` to estimate")


def run(cfg: DictConfig) -> float | None:
    """Check the configuration and do what ``cfg.mode`` says, showing a UserError as its message. Return the metric
    ``cfg.metric`` for a sweeper that searches, else None."""
    folder, sweeps, first = Path(cfg.output_dir), HydraConfig.get().mode == RunMode.MULTIRUN, is_first_rank()
    claimed: int | None = None  # the descriptor of the folder
    if not first:
        end_with_parent()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, _stop)
    try:
        if cfg.mode == "fit" and is_of_this_job(folder) and (newest := newest_in(folder / "checkpoints")):
            cfg.ckpt_path = str(newest)
        if first and (sweeps or cfg.mode in ("fit", "validate", "test")):
            claimed = claim(folder, _beginning(cfg), cfg.ckpt_path if cfg.mode == "fit" else None)
        _silence_other_packages()
        check_config(cfg, MODES)
        refuse_code_of_folders(cfg)
        chosen: Any = OmegaConf.to_container(cfg.trainer, resolve=True)
        cfg.trainer.update(open_values(chosen, default_epochs(cfg)))
        with needing(f"mode={cfg.mode}", "train"):
            mode = getattr(import_module(f"{__name__}.{MODES[cfg.mode]}"), cfg.mode)
        if cfg.mode not in ("prepare", "plan"):
            leave_mps(cfg)
        return mode(cfg)
    except BaseException as raised:  # A signal raises Stopped.
        error = _before_teardown(raised)
        if claimed is not None:
            record_failure(folder / "error.txt", error)
        if isinstance(error, UserError):
            if not first:  # The first rank mostly says the same, and this process ends with it.
                time.sleep(15)
            raise CompactHydraException(str(error)) from error  # Hydra prints this class as its message alone
        if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
            said = error.code if isinstance(error, SystemExit) and isinstance(error.code, str) else "Stopped by Ctrl-C"
            print(said, file=sys.stderr)
            raise SystemExit(128 + signal.SIGINT) from error  # Lightning's is 1
        if isinstance(error, Stopped) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # launchers send it more than once
        raise error from None if error is not raised else error.__cause__
    finally:
        if first and not sweeps:
            leave_nothing(folder, claimed=claimed is not None)
        if claimed is not None:
            os.close(claimed)


def _beginning(cfg: DictConfig) -> dict[str, Any]:
    """Return what a run says of itself when it begins."""
    hydra, words = HydraConfig.get(), command_line()
    flags = words[next((i for i, word in enumerate(words) if word.startswith("--")), len(words)) :]
    try:
        config = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException:  # The check will say so.
        config = {}
    return {"overrides": [*hydra.overrides.task], "cwd": hydra.runtime.cwd, "flags": flags, "config": config}


def _before_teardown(error: BaseException) -> BaseException:
    """Return what ended the run: Hydra wraps what a configured object raises, and while Lightning ends a trainer whose
    data were not loaded yet, another error comes."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, (Stopped, UserError)):
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return error if found is None else found


def _stop(number: int, frame: FrameType | None) -> None:
    if not isinstance(sys.exc_info()[1], Stopped):  # it is on its way already
        raise Stopped(number)


def _shown(record: logging.LogRecord) -> bool:
    """Make a message printable, which may name what a stranger's file has; return whether it is shown."""
    record.msg, record.args = printable(record.getMessage()), ()
    return not record.msg.startswith(_SAID_BY_LIGHTNING)


def _silence_other_packages() -> None:
    """Suppress messages of other packages that tell a user of the command nothing, also those at their import."""
    # A warning is a sentence, without the line of source that it came from.
    warnings.showwarning = lambda message, *_, **__: print(f"Warning: {printable(str(message))}", file=sys.stderr)
    # Tokens are read where they lie: there is nothing to load in parallel.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message="Precision .* is not supported by the model summary")
    # Hydra has made the folder.
    warnings.filterwarnings("ignore", message="(Experiment logs|Checkpoint) directory .* exists and is not empty")
    for category in (FutureWarning, DeprecationWarning):  # Libraries announce changes of their own code.
        warnings.filterwarnings("ignore", category=category)
    # Lightning prints its messages once and plainly if it is imported before a log is set up, and Hydra has set one up.
    for name in ("lightning.pytorch", "lightning.fabric"):
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.addHandler(logging.StreamHandler())
        logger.propagate = False
    # matplotlib logs its fonts, datasets the frameworks that are installed, Liger the backends of devices that are not
    # here, and bitsandbytes products that no optimiser takes.
    for name in ("matplotlib", "datasets", "liger_kernel.backends.registry", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_shown)
    # It says for each save that an argument has its default value.
    logging.getLogger("lightning.pytorch.trainer.connectors.checkpoint_connector").setLevel(logging.WARNING)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
