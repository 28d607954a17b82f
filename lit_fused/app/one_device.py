"""Run a model on one device, in the modes that train nothing."""

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning as L
from hydra.utils import instantiate
from omegaconf import DictConfig

from lit_fused.app.restore import restored
from lit_fused.models.load import is_deferred, materialize
from lit_fused.models.precision import prepare_precision
from lit_fused.training import FusedLMModule


def one_device_trainer(cfg: DictConfig) -> L.Trainer:
    """Return the run's trainer with its accelerator and precision, and one device."""
    alone = {"strategy": "auto", "devices": 1, "num_nodes": 1, "max_steps": 1, "callbacks": [], "logger": []}
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # An answer is printed, and nothing beside it.
    warnings.filterwarnings("ignore", module="lightning")
    return instantiate(cfg.trainer, **alone, enable_model_summary=False, enable_checkpointing=False)


def chosen_module(cfg: DictConfig) -> FusedLMModule:
    """Return the module of ``ckpt_path``, or else of the model that is configured."""
    if cfg.ckpt_path is not None:
        return restored(cfg, Path(cfg.ckpt_path).absolute())
    return instantiate(cfg.module)(instantiate(cfg.model))


def on_device(module: FusedLMModule, trainer: L.Trainer) -> FusedLMModule:
    """Return a module with its weights on the trainer's device, in its precision and in evaluation mode."""
    strategy = trainer.strategy
    prepare_precision(strategy, module.backbone, training=False)
    if is_deferred(module.model):
        materialize(module.model, strategy.root_device)
    converted: Any = strategy.precision_plugin.convert_module(module).to(strategy.root_device)
    return converted.eval()
