"""Run what ``mode=`` names: each mode is a function of the composed configuration.

A mode's module is imported when the configuration is right, and with it torch.
"""

import logging
import os
import warnings
from importlib import import_module
from pathlib import Path

from hydra.errors import CompactHydraException, InstantiationException
from omegaconf import DictConfig

from lit_fused.app.config import check_config
from lit_fused.app.reporting.files import record_failure
from lit_fused.errors import UserError

# The module in this folder that has a mode's function, which has the mode's name.
MODES = {
    "fit": "training",
    "validate": "training",
    "generate": "generating",
    "plan": "memory_plan",
    "fit_batch": "largest_batch",
    "prepare": "preparing",
}


def run(cfg: DictConfig) -> float | None:
    """Check the configuration and do what ``cfg.mode`` says; a :class:`UserError` becomes the one sentence it is.

    Returns:
        The metric that ``cfg.objective`` names, for a sweeper that searches; None for other sweepers and modes.
    """
    try:
        return _run(cfg)
    except UserError as error:  # Hydra prints this class as its message alone
        raise CompactHydraException(str(error)) from error
    except InstantiationException as error:  # around what the configured objects have raised
        if isinstance(error.__cause__, UserError):
            raise CompactHydraException(str(error.__cause__)) from error
        raise


def _run(cfg: DictConfig) -> float | None:
    error_file = Path(cfg.get("output_dir") or ".", "error.txt")
    error_file.unlink(missing_ok=True)  # of an earlier run in the same folder
    try:
        _silence_other_packages()
        check_config(cfg, MODES)
        return getattr(import_module(f"{__name__}.{MODES[cfg.mode]}"), cfg.mode)(cfg)
    except BaseException as error:
        cause = error.__cause__ if isinstance(error, InstantiationException) else None
        record_failure(error_file, cause if isinstance(cause, UserError) else error)
        raise


def _silence_other_packages() -> None:
    """Suppress what other packages say that tells a user of the command nothing. Some say it when they are imported."""
    # Tokens are memory-mapped: there is nothing to load in parallel.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # Hydra has made the folder.
    warnings.filterwarnings("ignore", message="Experiment logs directory .* exists and is not empty")
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*", category=FutureWarning)
    # Lightning prints its messages once and plainly if it is imported before a log is set up, and Hydra has set one up.
    for name in ("lightning.pytorch", "lightning.fabric"):
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.addHandler(logging.StreamHandler())
        logger.propagate = False
    # Hydra's log shows INFO: matplotlib's of its fonts, datasets' of the frameworks that are installed.
    for name in ("matplotlib", "datasets"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Liger names the backends of devices that are not here, Lightning services that were not chosen.
    logging.getLogger("liger_kernel.backends.registry").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_tip)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _is_no_tip(record: logging.LogRecord) -> bool:
    return "Tip: For seamless cloud" not in record.getMessage()
