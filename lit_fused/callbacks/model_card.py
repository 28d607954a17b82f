"""Write the model card of an exported model: what it was trained on and how, what was measured, and how to load it."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning as L

from lit_fused.callbacks.peak_memory import PeakMemoryMonitor
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
_MEASURED = ("val/loss", "val/perplexity", "val/accuracy")  # as they are also of a run that was resumed at its end


def model_card(trainer: L.Trainer, module: FusedLMModule) -> str:
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
