"""Answer the misspelt name of a monitored metric before training: Lightning answers after the first validation."""

from collections.abc import Collection

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lit_fused.errors import UserError, did_you_mean

_OURS = ("lit_fused.", "lightning.")
_OTHERS = ("memory/", "throughput/", "lr-", "epoch", "step")  # what callbacks and Lightning itself measure


def check_monitors(trainer: L.Trainer, module: L.LightningModule, metrics: Collection[str]) -> None:
    """Raise UserError if a callback monitors what the run never logs; ``metrics`` are the module's own, without stage.

    A module, callback or loss of a project may log any name, so nothing is refused where there is one.
    """
    callbacks: list[L.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    if not all(type(each).__module__.startswith(_OURS) for each in (module, *callbacks)):
        return
    known = [f"{stage}/{metric}" for stage in ("val", "train") for metric in sorted(metrics)]
    known += ["train/gradient_norm", "val/loss"]
    for callback in callbacks:
        monitor = callback.monitor if isinstance(callback, EarlyStopping | ModelCheckpoint) else None
        if monitor is None or monitor.startswith(_OTHERS) or "/".join(monitor.split("/")[:2]) in known:
            continue
        meant = did_you_mean(monitor.replace("_", "/", 1) if "/" not in monitor else monitor, known)
        raise UserError(
            f"{type(callback).__name__} monitors {monitor!r}, which this run does not log{meant}; it logs "
            f"{', '.join(known[: len(metrics)])}"
        )
