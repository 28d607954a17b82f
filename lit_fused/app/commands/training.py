"""``mode=fit``, ``validate``, ``test``: instantiate, fit or evaluate, and report."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning as L
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from lit_fused.app.commands.going_on import GoingOn
from lit_fused.app.config import check_precision
from lit_fused.app.continued import different_data
from lit_fused.app.loggers import recording
from lit_fused.app.reporting.run import begin, log_plots, report
from lit_fused.app.run_config import read_config
from lit_fused.callbacks import ResumeHint
from lit_fused.errors import UserError
from lit_fused.modules import FusedLMModule


def fit(cfg: DictConfig) -> float | None:
    """Fit, validate or test, as ``cfg.mode`` says, and return the objective."""
    L.seed_everything(cfg.seed, workers=True)
    trainer: L.Trainer = instantiate(cfg.trainer)
    begin(trainer, cfg.output_dir, HydraConfig.get().runtime.cwd)
    check_precision(cfg.precision, trainer)
    loss = instantiate(cfg.loss)
    data = instantiate(cfg.data)
    module = build_module(cfg, loss)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    if cfg.ckpt_path is not None and trainer.is_global_zero:
        different = different_data(config["data"], cfg.ckpt_path)
        if different is not None:
            print(f"mode={cfg.mode}: {different}")
    hints = _hints(trainer, Path(cfg.output_dir).absolute())
    if type(data).test_dataloader is L.LightningDataModule.test_dataloader:  # Data without a third part are tested on
        data.test_dataloader = data.val_dataloader  # the one that no weight was trained on.
    run = GoingOn(trainer, Path(cfg.output_dir))
    if cfg.mode != "fit":
        run.start_at(0)
    with recording(trainer.loggers, config), _steps_noted(trainer, run):
        getattr(trainer, cfg.mode)(module, data, ckpt_path=cfg.ckpt_path)
        try:
            metrics = report(trainer, module, cfg.output_dir, HydraConfig.get().overrides.task, run.earlier)
            log_plots(trainer, cfg.output_dir)
        except Exception as error:  # whatever it is, the run is trained: resuming makes up for what is missing
            for hint in hints:
                hint.on_exception(trainer, module, error)
            raise
    return _objective(cfg.objective, metrics)


validate = test = fit


def _hints(trainer: L.Trainer, run: Path) -> list[ResumeHint]:
    """Return the callbacks that say how to resume, for which a path is enough if a trusted configuration is saved."""
    hints = [c for c in trainer.callbacks if isinstance(c, ResumeHint)]  # type: ignore[attr-defined]
    with suppress(UserError):
        read_config(run)
        for hint in hints:
            hint.enough_in = run / "checkpoints"
    return hints


@contextmanager
def _steps_noted(trainer: L.Trainer, run: GoingOn) -> Iterator[None]:
    """Note on an exception how far the training was, if a step has ended: it is then about the training itself."""
    try:
        yield
    except Exception as error:  # any may come from a configured object; it is raised again
        if trainer.global_step > run.first_step:
            error.add_note(f"raised after {trainer.global_step} steps")
        raise


def _objective(name: str | None, metrics: Mapping[str, float]) -> float | None:
    """Return the metric that a search sweeper optimises. If it was not measured or is no finite number, raise UserError
    for such a sweeper and return None for others."""
    value = metrics.get(name or "", math.nan)
    if math.isfinite(value):
        return value
    hydra = HydraConfig.get()
    if hydra.mode == RunMode.MULTIRUN and not hydra.sweeper._target_.endswith(".BasicSweeper"):
        was = f"was {value}" if name in metrics else f"was not measured; it measured {', '.join(sorted(metrics))}"
        raise UserError(f"the sweep goes by objective={name}, which in this run {was}")
    return None


def build_module(cfg: DictConfig, loss: Any, model: nn.Module | None = None) -> FusedLMModule:
    build, model = instantiate(cfg.module), instantiate(cfg.model) if model is None else model
    module = build(model, loss, instantiate(cfg.optimizer), instantiate(cfg.scheduler))
    return module.train()  # a pretrained model comes in evaluation mode, in which Lightning would leave it
