"""The application: the commands ``train.py`` and ``lit-fused``. Hydra is imported here and nowhere else.

The names below are those that files of ``conf/`` use. They stay when a module moves: folders of runs have them written
down. Each is loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_fused.app.commands.memory_plan import PlanOptions
    from lit_fused.app.commands.trial_bench import FitBatchOptions
    from lit_fused.app.launching import OwnGpus
    from lit_fused.app.loggers import mlflow_logger, tensorboard_logger, wandb_logger
    from lit_fused.app.reporting.hydra_callback import OutputFolderCheck, SweepReport
    from lit_fused.models.generation import GenerateOptions

_PLACES = {
    "FitBatchOptions": "lit_fused.app.commands.trial_bench",
    "GenerateOptions": "lit_fused.models.generation",
    "OutputFolderCheck": "lit_fused.app.reporting.hydra_callback",
    "OwnGpus": "lit_fused.app.launching",
    "PlanOptions": "lit_fused.app.commands.memory_plan",
    "SweepReport": "lit_fused.app.reporting.hydra_callback",
    "mlflow_logger": "lit_fused.app.loggers",
    "tensorboard_logger": "lit_fused.app.loggers",
    "wandb_logger": "lit_fused.app.loggers",
}

__all__ = [
    "FitBatchOptions",
    "GenerateOptions",
    "OutputFolderCheck",
    "OwnGpus",
    "PlanOptions",
    "SweepReport",
    "mlflow_logger",
    "tensorboard_logger",
    "wandb_logger",
]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
