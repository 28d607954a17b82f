"""Run what ``mode=`` names: each mode is a function of the composed configuration.

A mode's module is imported when the configuration is right, and with it torch.
"""

import logging
import os
import warnings
from importlib import import_module
from pathlib import Path

from hydra.errors import CompactHydraException
from omegaconf import DictConfig

from lit_fused.app.config import check_config
from lit_fused.app.explaining import explained
from lit_fused.app.reporting.files import record_failure
from lit_fused.errors import UserError

# The module of each mode in this folder. It has a function of the mode's name.
MODES = {
    "fit": "training",
    "validate": "training",
    "generate": "generating",
    "plan": "memory_plan",
    "fit_batch": "largest_batch",
    "prepare": "training",
}


def run(cfg: DictConfig) -> float | None:
    """Check the configuration and do what ``cfg.mode`` says. A :class:`UserError` is shown as its message.

    Return the metric that ``cfg.objective`` names, for a sweeper that searches; None for other sweepers and modes.
    """
    error_file = Path(cfg.get("output_dir") or ".", "error.txt")
    error_file.unlink(missing_ok=True)  # of an earlier run in the same folder
    try:
        _silence_other_packages()
        with explained():
            check_config(cfg, MODES)
            return getattr(import_module(f"{__name__}.{MODES[cfg.mode]}"), cfg.mode)(cfg)
    except BaseException as error:
        record_failure(error_file, error)
        if isinstance(error, UserError):
            raise CompactHydraException(str(error)) from error  # Hydra prints this class as its message alone
        raise


def _silence_other_packages() -> None:
    """Suppress messages of other packages that tell a user of the command nothing, also those at their import."""
    # Tokens are read where they lie: there is nothing to load in parallel.
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
    # matplotlib logs its fonts, datasets the frameworks that are installed, Liger the backends of devices that are not
    # here, and Lightning services that were not chosen.
    for name in ("matplotlib", "datasets", "liger_kernel.backends.registry"):
        logging.getLogger(name).setLevel(logging.ERROR if name.startswith("liger") else logging.WARNING)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "Tip: For seamless cloud" not in record.getMessage()
    )
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
