"""Log text to the loggers that show it."""

from collections.abc import Iterable

from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only


@rank_zero_only
def log_text(loggers: Iterable[Logger], name: str, text: str, step: int) -> None:
    """Log text without formatting to the loggers that show text. Rank zero only."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()), step)
        elif isinstance(logger, WandbLogger):
            logger.log_text(name, columns=["text"], data=[[text]], step=step)
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_text(str(logger.run_id), text, f"{name}/step-{step}.txt")
