"""Run what ``mode=`` names: each mode is a function of the composed configuration.

A mode's module is imported when the configuration is right, and with it torch.
"""

import logging
import os
import signal
import sys
import threading
import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.errors import CompactHydraException, InstantiationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_fused.app.config import check_config, leave_mps
from lit_fused.app.faults import explain, fault_of
from lit_fused.app.fine_tuning import default_epochs
from lit_fused.app.ranks import end_with_parent, is_first_rank
from lit_fused.app.reporting.runs import record_failure
from lit_fused.app.run_length import open_values
from lit_fused.errors import Stopped, UserError, needing

# The module of each mode in this folder. It has a function of the mode's name.
MODES = {
    "fit": "training",
    "validate": "training",
    "test": "training",
    "generate": "generating",
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
    try:
        error_file = Path(str(cfg.get("output_dir") or "."), "error.txt")
    except OmegaConfBaseException:  # ${...} that leads nowhere: check_config says so
        error_file = Path("error.txt")
    if is_first_rank():
        with suppress(OSError):
            error_file.unlink()  # An earlier run in this folder left it.
    else:
        end_with_parent()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _stop)
    try:
        _silence_other_packages()
        check_config(cfg, MODES)
        chosen: Any = OmegaConf.to_container(cfg.trainer, resolve=True)
        cfg.trainer.update(open_values(chosen, default_epochs(cfg)))
        with needing(f"mode={cfg.mode}", "train"):
            mode = getattr(import_module(f"{__name__}.{MODES[cfg.mode]}"), cfg.mode)
        if cfg.mode not in ("prepare", "plan"):
            leave_mps(cfg)
        return mode(cfg)
    except BaseException as raised:  # A signal raises Stopped.
        error = _before_teardown(raised)
        # Hydra wraps what a configured object raises.
        cause = error.__cause__ if isinstance(error, InstantiationException) else error
        sentence = str(cause) if isinstance(cause, UserError) else fault_of(error) or explain(error)
        is_first = record_failure(error_file, UserError(sentence) if sentence else error)
        if not is_first and isinstance(error, Exception):
            raise SystemExit(1) from None  # another rank has failed before, and says why
        if sentence:
            raise CompactHydraException(sentence) from error  # Hydra prints this class as its message alone
        if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
            said = error.code if isinstance(error, SystemExit) and isinstance(error.code, str) else "Stopped by Ctrl-C"
            print(said, file=sys.stderr)
            raise SystemExit(128 + signal.SIGINT) from error  # Lightning's is 1
        if isinstance(error, Stopped) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # launchers send it more than once
        if error is raised:
            raise
        raise error from None


def _before_teardown(error: BaseException) -> BaseException:
    """Return what ended the run. While Lightning ends a trainer whose data were not loaded yet, another error comes."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, (Stopped, UserError)):
        found = None if found.__suppress_context__ else found.__context__
    return error if found is None else found


def _stop(number: int, frame: FrameType | None) -> None:
    if not isinstance(sys.exc_info()[1], Stopped):  # it is on its way already
        raise Stopped(number)


def _silence_other_packages() -> None:
    """Suppress messages of other packages that tell a user of the command nothing, also those at their import."""
    # A warning is a sentence, without the line of source that it came from.
    warnings.showwarning = lambda message, *_, **__: print(f"Warning: {message}", file=sys.stderr)
    # Tokens are read where they lie: there is nothing to load in parallel.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
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
    # here, bitsandbytes products that no optimiser takes, and Lightning services that were not chosen. Torch logs at
    # the end of the process how it used a cache, if a signal comes before it has set its own levels.
    for name in ("matplotlib", "datasets", "torch._subclasses.fake_tensor"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("liger_kernel.backends.registry", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: not record.getMessage().startswith(_SAID_BY_LIGHTNING)
    )
    logging.raiseExceptions = False  # A log file on a full disk ends no run.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
