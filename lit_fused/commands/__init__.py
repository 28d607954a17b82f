"""What ``train.py`` and ``lit-fused`` do, by ``mode=``: each a function of the composed configuration.

This room, ``conf/`` and ``train.py`` know Hydra; the rest of the package does not need it.
"""

from collections.abc import Callable
from pathlib import Path

from hydra.errors import CompactHydraException, InstantiationException
from omegaconf import DictConfig

from lit_fused.commands.fitting import fit_batch
from lit_fused.commands.generating import generate
from lit_fused.commands.planning import plan
from lit_fused.commands.preparing import prepare
from lit_fused.commands.training import fit, validate
from lit_fused.config import check_config
from lit_fused.errors import UserError
from lit_fused.reporting.run import record_failure

MODES: dict[str, Callable[[DictConfig], float | None]] = {
    "fit": fit,
    "validate": validate,
    "generate": generate,
    "plan": plan,
    "fit_batch": fit_batch,
    "prepare": prepare,
}


def run(cfg: DictConfig) -> float | None:
    """Check the configuration and do what ``cfg.mode`` says; a :class:`UserError` becomes the one sentence it is.

    Returns:
        what a sweeper that searches goes by: the metric that ``cfg.objective`` names.
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
        check_config(cfg, MODES)
        return MODES[cfg.mode](cfg)
    except BaseException as error:
        cause = error.__cause__ if isinstance(error, InstantiationException) else None
        record_failure(error_file, cause if isinstance(cause, UserError) else error)
        raise
