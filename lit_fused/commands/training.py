"""``mode=fit`` and ``mode=validate``: seed, instantiate, fit or evaluate, report."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig

from lit_fused.config import check_precision
from lit_fused.modules import FusedLMModule
from lit_fused.reporting.run import report


def fit(cfg: DictConfig) -> None:
    _run(cfg, lambda trainer, module, data: trainer.fit(module, data, ckpt_path=cfg.ckpt_path))


def validate(cfg: DictConfig) -> None:
    _run(cfg, lambda trainer, module, data: trainer.validate(module, data, ckpt_path=cfg.ckpt_path))


def _run(cfg: DictConfig, work: Callable[[L.Trainer, FusedLMModule, Any], object]) -> None:
    Path(cfg.output_dir, "summary.json").unlink(missing_ok=True)  # of an earlier run in the same folder
    L.seed_everything(cfg.seed, workers=True)
    trainer: L.Trainer = instantiate(cfg.trainer)
    check_precision(cfg.precision, trainer)
    loss = instantiate(cfg.loss)
    data = instantiate(cfg.data)
    module = build_module(cfg, loss)
    work(trainer, module, data)
    report(trainer, module, cfg.output_dir, HydraConfig.get().overrides.task)


def build_module(cfg: DictConfig, loss: Any) -> FusedLMModule:
    build = instantiate(cfg.module)
    module = build(instantiate(cfg.model), loss, instantiate(cfg.optimizer), instantiate(cfg.scheduler))
    return module.train()  # a pretrained model comes in evaluation mode, in which Lightning would leave it
