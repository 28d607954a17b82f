"""A callback for runs in processes of their own: what each training batch was, and a death without notice."""

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L


class BatchRecord(L.Callback):
    """Appends a line to ``folder/rank-R`` for each training batch: its epoch, its number, the hash of its input_ids.

    Args:
        folder: where; created by the test.
        die_at: kill this process (SIGKILL) as soon as this many batches have been trained on, over all epochs.
    """

    def __init__(self, folder: str, die_at: int | None = None) -> None:
        self.folder = folder
        self.die_at = die_at

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        digest = hashlib.sha256(batch["input_ids"].cpu().numpy().tobytes()).hexdigest()[:16]
        with Path(self.folder, f"rank-{trainer.global_rank}").open("a") as file:
            file.write(f"{trainer.current_epoch} {batch_idx} {digest}\n")
        if self.die_at is not None and trainer.fit_loop.epoch_loop.total_batch_idx + 1 == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
