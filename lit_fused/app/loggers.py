"""Build the loggers of ``logger=``, go on with ``metrics.csv``, and log the configuration."""

import csv
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from lit_fused.app.run_folder import write_whole
from lit_fused.atomic import WRITING
from lit_fused.errors import UserError, needing


def tensorboard_logger(save_dir: str) -> TensorBoardLogger:
    """Return a logger that writes event files to ``save_dir``. Raises UserError if tensorboard is not installed."""
    with needing("logger=tensorboard", "tensorboard"):
        return TensorBoardLogger(save_dir, name="", version="", default_hp_metric=False)


def wandb_logger(
    project: str,
    save_dir: str,
    name: str | None = None,
    group: str | None = None,
    offline: bool | None = None,
    tags: Sequence[Any] = (),
) -> WandbLogger:
    """Return the logger of a Weights & Biases run. Raises UserError if wandb is not installed.

    Args:
        project, name, group: of the run; without a name W&B invents one; a group is for instance a sweep.
        save_dir: the folder that gets the folder ``wandb``.
        tags: words to find the run by.
        offline: write files only, for ``wandb sync``; null: only if nobody is logged in and WANDB_MODE is not set.
    """
    with needing("logger=wandb", "wandb"):
        import wandb
    if offline is None and "WANDB_MODE" not in os.environ and not _logged_in(wandb.setup().settings):
        offline, place = True, os.path.relpath(Path(save_dir, "wandb"))
        rank_zero_info(
            f"Nobody is logged in to Weights & Biases: the run is written to {place} only, for `wandb sync`. "
            "`wandb login`, or WANDB_API_KEY, sends it at once."
        )
    mode: Any = {"mode": "offline"} if offline else {}
    logger = WandbLogger(project=project, save_dir=save_dir, name=name, group=group, tags=[*map(str, tags)], **mode)
    logger._wandb_init.pop("anonymous", None)  # Lightning always passes it, and W&B warns that it has no effect.
    return logger


def _logged_in(settings: Any) -> bool:
    from requests.utils import get_netrc_auth  # a dependency of wandb

    return bool(settings.api_key or settings.identity_token_file or get_netrc_auth(settings.base_url))


def mlflow_logger(
    experiment_name: str,
    folder: str,
    tracking_uri: str | None = None,
    run_name: str | None = None,
    tags: Sequence[Any] = (),
) -> MLFlowLogger:
    """Return the logger of an MLflow run. Raises UserError if mlflow is not installed.

    Args:
        experiment_name, run_name: an experiment is created if it does not exist; without a name MLflow invents one.
        tags: words to find the run by; each is a tag of the run, with the value "true".
        folder: where the local store lies, ``mlflow.db`` and ``artifacts``.
        tracking_uri: a server, ``http://...``, or another store; null: MLFLOW_TRACKING_URI, else the local store.
    """
    with needing("logger=mlflow", "mlflow"):
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
    named = {str(tag): "true" for tag in tags}
    return MLFlowLogger(experiment_name, run_name, tracking_uri, named, artifact_location=artifacts)


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
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        try:
            yield
        finally:
            logger.setLevel(level)


class RunCSVLogger(CSVLogger):
    """Lightning's ``CSVLogger``, which deletes a file that exists, without doing so."""

    def __init__(self, save_dir: str | Path) -> None:
        super().__init__(save_dir, name="", version="")

    @property
    @rank_zero_experiment
    def experiment(self) -> "_Writer":
        if self._experiment is None:
            os.makedirs(self.save_dir, exist_ok=True)
            self._experiment = _Writer(self.log_dir)
        assert isinstance(self._experiment, _Writer)
        return self._experiment

    @rank_zero_only
    def keep(self, wanted: Callable[[dict[str, str]], bool], last: Mapping[str, float] | None = None) -> None:
        """Keep the ``wanted`` whole rows and continue below them; add the row ``last`` if a kill prevented it."""
        self.experiment.rewrite(wanted, last or {})


class _Writer(ExperimentWriter):
    def _check_log_dir_exists(self) -> None:
        pass  # Lightning deletes the file here

    def save(self) -> None:
        try:
            super().save()
        except OSError as error:
            error.add_note(f"{WRITING}{self.metrics_file_path}")
            raise

    def rewrite(self, wanted: Callable[[dict[str, str]], bool], last: Mapping[str, float]) -> None:
        path = Path(self.metrics_file_path)
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
            rows = csv.DictReader(line for line in lines if line.endswith("\n"))  # a kill may have cut the last one off
            try:
                whole = [row for row in rows if None not in (*row, *row.values()) and row["step"].isdecimal()]
            except (KeyError, csv.Error) as error:
                fault = f"{path} is damaged ({type(error).__name__}: {error})"
                raise UserError(f"{fault}; move it away, and the run goes on with a new one") from error
            kept: list[dict[str, Any]] = [row for row in whole if wanted(row)]
            names = last.keys() - {"step", "epoch"}
            if names and not any(row["step"] == str(last["step"]) and any(map(row.get, names)) for row in kept):
                kept.append(dict(last))
            # A resumed run logs again what it had logged when it began.
            self.metrics = [row for row in self.metrics if not any(_has(old, row) for old in kept)]
            self.metrics_keys = list(dict.fromkeys([*(rows.fieldnames or ()), *last]))
            self._write(kept, self.metrics_keys)

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        with open(self.metrics_file_path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        self._write(rows, fieldnames)

    def _write(self, rows: list[dict[str, Any]], fieldnames: list[str]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames)
        writer.writeheader()
        writer.writerows(rows)
        write_whole(Path(self.metrics_file_path), text.getvalue().encode())


def _has(old: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    return old["step"] == str(row["step"]) and all(old.get(name) not in (None, "") for name in row)
