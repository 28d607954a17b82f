"""Export the trained model as a Hugging Face folder, with a model card, when training ends."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from lit_fused.callbacks.peak_memory import PeakMemoryMonitor
from lit_fused.callbacks.weight_average import WeightAverage
from lit_fused.errors import UserError, check_choice
from lit_fused.export.own_folder import check_own
from lit_fused.models.certificate import text_of
from lit_fused.parallel.checkpoint import read_rest, read_weights, wait_for_checkpoints
from lit_fused.training import FusedLMModule

_CARD = """---
library_name: transformers
tags: [lit_fused]
---

# {name}

```python
from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained("THIS_FOLDER")
tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")
```

| | |
|---|---|
{rows}
"""
_CERTIFICATE = """
## Certificate

{}
"""
_METRICS = ("val/loss", "val/perplexity", "val/accuracy")


class ExportPretrained(L.Callback):
    """Writes weights, configuration, generation settings, tokenizer and a model card (``README.md``) into a folder that
    transformers' ``from_pretrained`` loads.

    Args:
        folder: where to write. A folder that an export wrote is replaced; one with other files is refused.
        which: "last" for the weights at the end of training (their average, if there is one); "best" for those of the
            best checkpoint of a ``ModelCheckpoint`` with a monitored metric.

    Attributes:
        step: after fit, the optimiser step whose weights were exported.
    """

    step: int | None = None

    def __init__(self, folder: str | Path, which: str = "last") -> None:
        check_choice("which", which, ("last", "best"))
        self.folder, self.which = Path(folder), which
        self._measured: dict[int, dict[str, float]] = {}  # metrics by the step of their validation

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.step, self._measured = None, {}
        check_own(self.folder)
        if self.which == "best" and not _monitors(trainer):
            raise UserError(
                "the best weights are those of a ModelCheckpoint with a monitored metric, and there is none; choose "
                "callbacks=best, or callbacks.export.which=last"
            )

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            metrics = trainer.callback_metrics
            self._measured[trainer.global_step] = {name: float(metrics[name]) for name in _METRICS if name in metrics}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, FusedLMModule)
        if not trainer.is_global_zero and not pl_module.is_sharded:
            return
        tokenizer = getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
        self.step, weights, metrics = trainer.global_step, None, self._measured.get(trainer.global_step, {})
        wait_for_checkpoints(trainer.strategy)
        saver = _monitors(trainer)[0] if self.which == "best" else None
        path = "" if saver is None else saver.best_model_path
        if pl_module.is_sharded:  # All ranks are here, and they may differ in what they know of other ranks' files.
            path = trainer.strategy.broadcast(path)
        if saver is not None and not path:
            rank_zero_warn(f"no checkpoint was compared by {saver.monitor}; the last weights are exported")
        elif saver is not None:
            weights = read_weights(path) if trainer.is_global_zero else {}
            self.step = int(read_rest(path)["global_step"])
            score = {} if saver.best_model_score is None else {str(saver.monitor): float(saver.best_model_score)}
            metrics = self._measured.get(self.step, {}) | score
        try:
            pl_module.model_card = _card_of(trainer, pl_module, self.step, metrics)
            pl_module.save_pretrained(self.folder, tokenizer, weights)
        finally:
            pl_module.model_card = None  # It is of these weights alone.


def _monitors(trainer: L.Trainer) -> list[ModelCheckpoint]:
    return [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.monitor is not None]


def _card_of(trainer: L.Trainer, module: FusedLMModule, step: int, metrics: dict[str, float]) -> str:
    """Return the text of ``README.md``: data, settings, losses, memory and versions of the run that ends now."""
    data = getattr(trainer, "datamodule", None)
    optimizer: Any = trainer.optimizers[0] if trainer.optimizers else None
    sources = [str(name) for name in getattr(data, "source_names", None) or ()]
    rows = {
        # It does not say where this machine has them.
        "data": ", ".join(Path(name).name if Path(name).is_absolute() else name for name in sources),
        "trained for": f"{step:,} optimizer steps" + f" of {trainer.global_step:,}" * (step != trainer.global_step),
        "loss": getattr(module.model.loss, "ran", None) or type(module.model.loss).__name__,
        "optimizer": optimizer and f"{type(optimizer).__name__}, lr {optimizer.defaults.get('lr')}",
        "accumulated batches, clipping": f"{trainer.accumulate_grad_batches}, {trainer.gradient_clip_val}",
        "precision, devices": f"{trainer.precision}, {trainer.world_size} x {trainer.strategy.root_device.type}",
    }
    rows |= {name: f"{value:.4g}" for name, value in metrics.items()}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, PeakMemoryMonitor) and callback.peaks:
            rows["peak memory"] = f"{max(callback.peaks.values()):.3f} GiB"
        elif isinstance(callback, WeightAverage):
            rows["weights"] = f"their moving average, decay {callback.decay}"
    rows["versions"] = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "transformers"))
    table = "\n".join(f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows.items() if value)
    certificate = module.certify()
    card = _CARD.format(name=type(module.backbone).__name__, auto=module.auto_class, rows=table)
    return card if certificate is None else card + _CERTIFICATE.format(text_of(certificate))
