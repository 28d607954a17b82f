"""Run a model on one device, in the modes that train nothing."""

from typing import Any

import lightning as L
from hydra.utils import instantiate
from omegaconf import DictConfig

from lit_fused.app.config import check_one_device, check_precision
from lit_fused.app.loggers import quiet_lightning
from lit_fused.models.load import is_deferred, materialize
from lit_fused.models.precision import prepare_precision
from lit_fused.training import FusedLMModule


def one_device_trainer(cfg: DictConfig, otherwise: str) -> L.Trainer:
    """Return the run's trainer with its device and precision alone; UserError, ending ``otherwise``, for several."""
    check_one_device(cfg, otherwise)
    nothing = {"callbacks": [], "logger": [], "enable_model_summary": False, "enable_checkpointing": False}
    with quiet_lightning():
        trainer: L.Trainer = instantiate(cfg.trainer, devices=1, max_steps=1, **nothing)
    check_precision(cfg.precision, trainer)
    return trainer


def on_device(module: FusedLMModule, trainer: L.Trainer) -> FusedLMModule:
    """Return a module with its weights on the trainer's device, in its precision and in evaluation mode."""
    strategy = trainer.strategy
    prepare_precision(strategy, module.backbone, training=False)
    if is_deferred(module.model):
        materialize(module.model, strategy.root_device)
    converted: Any = strategy.precision_plugin.convert_module(module).to(strategy.root_device)
    return converted.eval()
