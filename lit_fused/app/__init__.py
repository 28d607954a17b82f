"""The application: the commands ``train.py`` and ``lit-fused``. Hydra is imported here and nowhere else.

Files of ``conf/`` use the names below. A name stays when its module moves, because folders of older runs contain it.
Each is loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # read as text, also by __getattr__
    from lit_fused.app.commands.memory_plan import PlanOptions
    from lit_fused.app.commands.trial_bench import FitBatchOptions
    from lit_fused.app.launching import OwnGpus
    from lit_fused.app.loggers import RunCSVLogger, mlflow_logger, tensorboard_logger, wandb_logger
    from lit_fused.app.reporting.hydra_callback import OutputFolderCheck, SweepReport
    from lit_fused.models.generation import GenerateOptions


def __getattr__(name: str) -> Any:
    from lit_fused.app.signatures import definition

    found = None if name.startswith("_") else definition(__name__, name)
    if not isinstance(found, tuple):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(found[0]), name)
