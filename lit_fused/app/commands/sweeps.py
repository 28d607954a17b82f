"""Write the summary of a mode that does not train, so that a sweep's table does not count its job as failed."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lit_fused.app.reporting.run import RunSummary


def leave_for_sweep(cfg: DictConfig, status: str, metrics: Mapping[str, float]) -> None:
    """Write ``summary.json`` in a sweep's job folder; a folder that belongs to no sweep may have a run's own."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        overrides = list(HydraConfig.get().overrides.task)
        summary = RunSummary(status, overrides, steps=0, tokens=0, logits_gib=0.0, metrics=dict(metrics))
        Path(cfg.output_dir, "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n")
