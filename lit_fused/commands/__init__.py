"""What ``train.py`` and ``lit-fused`` do, by ``mode=``: each a function of the composed configuration.

This room, ``conf/`` and ``train.py`` know Hydra; the rest of the package does not need it.
"""

from collections.abc import Callable

from hydra.errors import CompactHydraException, InstantiationException
from omegaconf import DictConfig

from lit_fused.commands.fitting import fit_batch
from lit_fused.commands.generating import generate
from lit_fused.commands.planning import plan
from lit_fused.commands.preparing import prepare
from lit_fused.commands.training import fit, validate
from lit_fused.config import check_config
from lit_fused.errors import UserError

MODES: dict[str, Callable[[DictConfig], None]] = {
    "fit": fit,
    "validate": validate,
    "generate": generate,
    "plan": plan,
    "fit_batch": fit_batch,
    "prepare": prepare,
}


def run(cfg: DictConfig) -> None:
    """Check the configuration and do what ``cfg.mode`` says; a :class:`UserError` becomes the one sentence it is."""
    try:
        check_config(cfg, MODES)
        MODES[cfg.mode](cfg)
    except UserError as error:  # Hydra prints this class as its message alone
        raise CompactHydraException(str(error)) from error
    except InstantiationException as error:  # around what the configured objects have raised
        if isinstance(error.__cause__, UserError):
            raise CompactHydraException(str(error.__cause__)) from error
        raise
