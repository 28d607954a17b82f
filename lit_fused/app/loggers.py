"""Log the configuration of a run to its loggers, and finish them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger


@contextmanager
def recording(loggers: Sequence[Logger], config: Mapping[str, Any]) -> Iterator[None]:
    """Log the configuration of a run, and finish its Weights & Biases run after the block: the next job of a sweep in
    this process would go on with it."""
    exit_code = 1
    for logger in loggers:
        if not isinstance(logger, CSVLogger):  # run.json, beside its file, has it
            logger.log_hyperparams(dict(config))
    try:
        yield
        exit_code = 0
    finally:
        if any(isinstance(logger, WandbLogger) for logger in loggers):
            import wandb

            wandb.finish(exit_code)  # does nothing on the other ranks, which have no run
