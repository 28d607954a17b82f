"""Export the trained model as a Hugging Face folder, with a model card, when training ends."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from lit_fused.callbacks.peak_memory import PeakMemoryMonitor
from lit_fused.callbacks.weight_average import averaged_weights
from lit_fused.checkpoints.own_folder import check_own
from lit_fused.checkpoints.reading import final_weights
from lit_fused.errors import UserError, check_choice
from lit_fused.modules import FusedLMModule

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
_MEASURED = ("val/loss", "val/perplexity", "val/accuracy")  # A run resumed at its end has these, too.


class ExportPretrained(L.Callback):
    """Writes weights, configuration, generation settings, tokenizer and a model card (``README.md``) into a folder that
    transformers' ``from_pretrained`` loads.

    Args:
        folder: where to write. A folder that an export wrote is replaced; one with other files is refused.
        which: "last" for the weights at the end of training (their average, if there is one); "best" for those of the
            best checkpoint of a ``ModelCheckpoint`` with a monitored metric.
    """

    def __init__(self, folder: str | Path, which: str = "last") -> None:
        check_choice("which", which, ("last", "best"))
        self.folder, self.which = Path(folder), which

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        check_own(self.folder)
        if self.which == "best" and not _monitors(trainer):
            raise UserError(
                "the best weights are those of a ModelCheckpoint with a monitored metric, and there is none; choose "
                "callbacks=best, set callbacks.checkpoint.monitor, or callbacks.export.which=last"
            )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, FusedLMModule)
        if not trainer.is_global_zero and not pl_module.is_sharded:
            return
        tokenizer = getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
        pl_module.model_card = _card_of(trainer, pl_module)
        if self.which == "best":
            monitor = _monitors(trainer)[0]
            path = trainer.strategy.broadcast(monitor.best_model_path)
            if path:
                model = pl_module.model.transformers_model
                weights = final_weights(Path(path), model) if trainer.is_global_zero else {}
                pl_module.save_pretrained(self.folder, tokenizer, weights)
                return
            rank_zero_warn(f"no checkpoint was compared by {monitor.monitor}; the last weights are exported")
        with averaged_weights(trainer):
            pl_module.save_pretrained(self.folder, tokenizer)


def _monitors(trainer: L.Trainer) -> list[ModelCheckpoint]:
    return [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.monitor is not None]


def _card_of(trainer: L.Trainer, module: FusedLMModule) -> str:
    """Return the text of ``README.md``: data, settings, losses, memory and versions of the run that ends now."""
    data = getattr(trainer, "datamodule", None)
    optimizer: Any = trainer.optimizers[0] if trainer.optimizers else None
    sources = [str(name) for name in getattr(data, "source_names", None) or ()]
    loss = getattr(module.model.loss, "ran", None) or type(module.model.loss).__name__
    rows = {
        # It does not say where this machine has them.
        "data": ", ".join(Path(name).name if Path(name).is_absolute() else name for name in sources),
        "trained for": f"{trainer.global_step:,} optimizer steps",
        "loss": loss,
        "optimizer": optimizer and f"{type(optimizer).__name__}, lr {optimizer.defaults.get('lr')}",
        "accumulated batches, clipping": f"{trainer.accumulate_grad_batches}, {trainer.gradient_clip_val}",
        "precision, devices": f"{trainer.precision}, {trainer.world_size} x {trainer.strategy.root_device.type}",
    }
    measured = trainer.callback_metrics
    rows |= {name: f"{float(measured[name]):.4g}" for name in _MEASURED if name in measured}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, PeakMemoryMonitor) and callback.peaks:
            rows["peak memory"] = f"{max(callback.peaks.values()):.3f} GiB"
    rows["versions"] = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "transformers"))
    return _CARD.format(
        name=type(module.backbone).__name__,
        auto=module.auto_class,
        rows="\n".join(
            f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows.items() if value
        ),
    )
