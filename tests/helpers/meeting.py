"""A callback whose run goes on once others run beside it."""

import os
import time
from pathlib import Path

import lightning as L


class Meeting(L.Callback):
    """Waits, before training, for as many processes as are to meet in a folder; RuntimeError after a minute."""

    def __init__(self, folder: str, processes: int) -> None:
        self.folder, self.processes = Path(folder), processes

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / str(os.getpid())).touch()
        latest = time.monotonic() + 60
        while len(list(self.folder.iterdir())) < self.processes:
            if time.monotonic() > latest:
                raise RuntimeError(f"{self.processes} processes were to run side by side")
            time.sleep(0.05)
