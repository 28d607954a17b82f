"""Build the loggers of ``logger=``, and log the configuration and pictures, which Lightning does not log by itself."""

import io
import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from lit_fused.errors import UserError


@contextmanager
def _needing(extra: str, package: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"logger={extra} needs {package}, which cannot be imported ({error}). Install it with: "
            f"pip install 'lit-fused[{extra}]'"
        ) from error


def tensorboard_logger(save_dir: str) -> TensorBoardLogger:
    """Return a logger that writes event files to ``save_dir``. Raises UserError if tensorboard is not installed."""
    with _needing("tensorboard", "tensorboard"):
        return TensorBoardLogger(save_dir, name="", version="", default_hp_metric=False)


def wandb_logger(
    project: str, save_dir: str, name: str | None = None, group: str | None = None, offline: bool | None = None
) -> WandbLogger:
    """Return the logger of a Weights & Biases run. Raises UserError if wandb is not installed.

    Args:
        project: the project of the run.
        save_dir: the folder that gets the folder ``wandb``.
        name: the run's name; null: W&B invents one.
        group: the group of the run, for instance its sweep.
        offline: write files only, for ``wandb sync``; null: only if nobody is logged in and WANDB_MODE is not set.
    """
    with _needing("wandb", "wandb"):
        import wandb
    if offline is None:
        offline = "WANDB_MODE" not in os.environ and not _logged_in(wandb.setup().settings)
        if offline:
            place = os.path.relpath(Path(save_dir, "wandb"))
            rank_zero_info(
                f"Nobody is logged in to Weights & Biases: the run is written to {place} only, for `wandb sync`. "
                "`wandb login`, or WANDB_API_KEY, sends it at once."
            )
    mode: Any = {"mode": "offline"} if offline else {}
    return WandbLogger(project=project, save_dir=save_dir, name=name, group=group, **mode)


def _logged_in(settings: Any) -> bool:
    from requests.utils import get_netrc_auth  # a dependency of wandb

    return bool(settings.api_key or settings.identity_token_file or get_netrc_auth(settings.base_url))


def mlflow_logger(
    experiment_name: str, folder: str, tracking_uri: str | None = None, run_name: str | None = None
) -> MLFlowLogger:
    """Return the logger of an MLflow run. Raises UserError if mlflow is not installed.

    Args:
        experiment_name: the experiment of the run; created if it does not exist.
        folder: where the local store lies, ``mlflow.db`` and ``artifacts``.
        tracking_uri: a server, ``http://...``, or another store; null: MLFLOW_TRACKING_URI, else the local store.
        run_name: the run's name; null: MLflow invents one.
    """
    with _needing("mlflow", "mlflow-skinny"):
        from mlflow.tracking import MlflowClient
    artifacts = None
    tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not tracking_uri:
        place = Path(folder).absolute()
        place.mkdir(parents=True, exist_ok=True)
        tracking_uri, artifacts = f"sqlite:///{place / 'mlflow.db'}", (place / "artifacts").as_uri()
        if getattr(rank_zero_only, "rank", 0) == 0:
            # Jobs of a sweep that start together would each create the tables and the experiment.
            with FileLock(place / ".lock"):
                client = MlflowClient(tracking_uri)
                if client.get_experiment_by_name(experiment_name) is None:
                    client.create_experiment(experiment_name, artifacts)
    return MLFlowLogger(experiment_name, run_name, tracking_uri, artifact_location=artifacts)


@contextmanager
def recording(loggers: Sequence[Logger], config: Mapping[str, Any]) -> Iterator[None]:
    """Log the configuration of a run, and finish its Weights & Biases run after the block, also if the run fails."""
    exit_code = 1
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger | WandbLogger | MLFlowLogger):  # .hydra, beside a CSV file, has it
            logger.log_hyperparams(dict(config))
    try:
        yield
        exit_code = 0
    finally:
        if any(isinstance(logger, WandbLogger) for logger in loggers):
            import wandb

            wandb.finish(exit_code)  # does nothing on the other ranks, which have no run


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Suppress what Lightning logs about every trainer."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        try:
            yield
        finally:
            logger.setLevel(level)


@rank_zero_only
def log_image(loggers: Iterable[Logger], name: str, png: bytes, step: int) -> None:
    """Log a picture to the loggers that show images. This needs Pillow, which matplotlib installs."""
    from PIL import Image

    image = Image.open(io.BytesIO(png)).convert("RGB")
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(name, np.asarray(image), step, dataformats="HWC")
            logger.experiment.flush()
        elif isinstance(logger, WandbLogger):
            logger.log_image(name, [image], step=step)
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_image(str(logger.run_id), image, f"{name}.png")
