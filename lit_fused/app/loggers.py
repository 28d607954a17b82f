"""TensorBoard, Weights & Biases and MLflow as ``logger=`` builds them, and what they get beside numbers.

Numbers are Lightning's business. Here: the composed configuration as hyperparameters, samples as text, and plots as
images, to the loggers that can show them; and the end of a Weights & Biases run, which would go on into the next job of
a sweep. All of it on rank zero only.
"""

import io
import netrc
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
from filelock import FileLock
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from lit_fused.errors import UserError


def _needs(extra: str, package: str, error: ImportError) -> UserError:
    return UserError(
        f"logger={extra} needs {package}, which cannot be imported ({error}). Install it with: "
        f"pip install 'lit-fused[{extra}]'"
    )


def tensorboard_logger(save_dir: str) -> TensorBoardLogger:
    """Event files in ``save_dir``.

    Raises:
        UserError: tensorboard is not installed.
    """
    try:
        return TensorBoardLogger(save_dir, name="", version="", default_hp_metric=False)
    except ImportError as error:
        raise _needs("tensorboard", "tensorboard", error) from error


def wandb_logger(
    project: str, save_dir: str, name: str | None = None, group: str | None = None, offline: bool | None = None
) -> WandbLogger:
    """A Weights & Biases run.

    Args:
        project: to which the run belongs.
        save_dir: the folder that gets the folder ``wandb``.
        name: of the run; null: one that W&B invents.
        group: of runs, for instance those of a sweep.
        offline: write files only, for ``wandb sync``. null: where nobody is logged in and WANDB_MODE is not set.

    Raises:
        UserError: wandb is not installed.
    """
    try:
        import wandb
    except ImportError as error:
        raise _needs("wandb", "wandb", error) from error
    if offline is None:
        offline = "WANDB_MODE" not in os.environ and not _logged_in(wandb.setup().settings)
        if offline:
            place = os.path.relpath(Path(save_dir, "wandb"))
            rank_zero_info(
                f"Nobody is logged in to Weights & Biases: the run is written to {place} only, for `wandb sync`. "
                "`wandb login`, or WANDB_API_KEY, sends it at once."
            )
    mode: dict[str, Any] = {"mode": "offline"} if offline else {}
    return WandbLogger(project=project, save_dir=save_dir, name=name, group=group, **mode)


def _logged_in(settings: Any) -> bool:
    if settings.api_key or settings.identity_token_file:
        return True
    try:
        entries = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return entries.authenticators(urlparse(settings.base_url).hostname or "") is not None


def mlflow_logger(
    experiment_name: str, folder: str, tracking_uri: str | None = None, run_name: str | None = None
) -> MLFlowLogger:
    """An MLflow run.

    Args:
        experiment_name: to which the run belongs; made where there is none of that name.
        folder: of the local store, ``mlflow.db`` and ``artifacts``.
        tracking_uri: of a server, ``http://...``, or any other store. null: MLFLOW_TRACKING_URI, else the local store.
        run_name: null: one that MLflow invents.

    Raises:
        UserError: mlflow is not installed.
    """
    try:
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise _needs("mlflow", "mlflow-skinny", error) from error
    artifacts = None
    tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not tracking_uri:
        place = Path(folder).absolute()
        place.mkdir(parents=True, exist_ok=True)
        tracking_uri, artifacts = f"sqlite:///{place / 'mlflow.db'}", (place / "artifacts").as_uri()
        if getattr(rank_zero_only, "rank", 0) == 0:
            # the jobs of a sweep that start together would each make the tables, and the experiment
            with FileLock(place / ".lock"):
                client = MlflowClient(tracking_uri)
                if client.get_experiment_by_name(experiment_name) is None:
                    client.create_experiment(experiment_name, artifacts)
    return MLFlowLogger(experiment_name, run_name, tracking_uri, artifact_location=artifacts)


@contextmanager
def recording(loggers: Iterable[Logger], config: Mapping[str, Any]) -> Iterator[None]:
    """A run from its configuration to its end, also if it fails."""
    loggers = list(loggers)
    _log_config(loggers, config)
    try:
        yield
    except BaseException:
        _finish(loggers, 1)
        raise
    _finish(loggers, 0)


@rank_zero_only
def _log_config(loggers: list[Logger], config: Mapping[str, Any]) -> None:
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger | WandbLogger | MLFlowLogger):  # a CSV file lies beside .hydra
            logger.log_hyperparams(dict(config))


@rank_zero_only
def _finish(loggers: list[Logger], exit_code: int) -> None:
    if any(isinstance(logger, WandbLogger) for logger in loggers):
        import wandb

        wandb.finish(exit_code)


@rank_zero_only
def log_image(loggers: Iterable[Logger], name: str, png: bytes, step: int) -> None:
    """A picture, to the loggers that can. Needs Pillow, as matplotlib does, which has made it."""
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
