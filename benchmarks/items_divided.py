"""Train SASRec on a catalogue that two GPUs divide, beside one GPU with the whole: ms a step, GiB of each device.

    python benchmarks/items_divided.py
    python benchmarks/items_divided.py --shapes 8,8,64,5000 --device cpu --steps 4

Of each shape (rows of a device, items in a row, D hidden, items V), in bf16-mixed with RowWiseAdagrad: one device with
its rows; one device with the rows of both, whose losses the divided catalogue has to have; two devices with a whole
table each (DDP); two with a part each. Each cell is a process group of its own. Milliseconds are the median of the
steps after the first ones; GiB the peak of the fullest device, and what is left after a step.
"""

import argparse
import json
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from cells import run_cells
from torch.utils.data import DataLoader, Dataset

from lit_fused import FusedRecommenderModule, SASRec
from lit_fused.modules import RowWiseAdagrad
from lit_fused.parallel import FSDP2Strategy

SHAPES = ["128,64,64,1000000", "128,64,128,1000000", "64,64,64,10000000", "64,64,128,10000000"]
CELLS = {  # name: devices, rows of a device in units of a shape's
    "one device": (1, 1),
    "one device, the rows of both": (1, 2),
    "two devices, ddp": (2, 1),
    "two devices, divided": (2, 1),
}
WARM_UP = 3
TOLERANCE = 2**-8  # of the mean loss: one rounding to bfloat16


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of random items, of which the devices take turns; Lightning's own sampler would shuffle them."""

    def __init__(self, rows: int, length: int, items: int, devices: int) -> None:
        self.rows, self.length, self.items, self.devices = rows, length, items, devices
        self.first = int(os.environ.get("LOCAL_RANK", 0))

    def __len__(self) -> int:
        return self.rows // self.devices

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index * self.devices + self.first)
        drawn = torch.randint(1, self.items + 1, (self.length,), generator=generator)
        return {"input_ids": drawn, "labels": drawn}


class Clock(L.Callback):
    """Notes the milliseconds and the loss of each step, and the GiB of the fullest device: peak, and after a step."""

    def __init__(self) -> None:
        self.milliseconds: list[float] = []
        self.losses: list[torch.Tensor] = []
        self.gib = [0.0, 0.0]
        self._last = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        on_gpu = trainer.strategy.root_device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.milliseconds.append(1e3 * (now - self._last))
        self.losses.append(trainer.callback_metrics["train/loss"].detach())
        if on_gpu and len(self.losses) == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        self._last = now

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if pl_module.device.type == "cuda":
            numbers = [torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()]
            of_all: Any = pl_module.all_gather(torch.tensor(numbers))
            self.gib = (of_all.reshape(-1, 2).amax(0) / 2**30).tolist()


def measured(options: argparse.Namespace) -> None:
    """Fit one cell, and let rank 0 print what was found as JSON."""
    rows, length, hidden_size, items = map(int, options.shape.split(","))
    devices, share = CELLS[options.cell]
    divided = options.cell.endswith("divided")
    torch.manual_seed(0)
    module = FusedRecommenderModule(
        SASRec(items, hidden_size=hidden_size, num_layers=2, max_length=length, dropout=0.0),
        optimizer=partial(RowWiseAdagrad, lr=0.01),
        divide_items=divided,
        parity_check=False,
    )
    clock, on_gpu = Clock(), options.device == "cuda"
    quiet: dict[str, Any] = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=devices,
        strategy=FSDP2Strategy() if divided else "ddp" if devices == 2 else "auto",
        precision="bf16-mixed",
        max_steps=options.steps,
        logger=False,
        use_distributed_sampler=False,
        callbacks=[clock],
        **quiet,
    )
    data = Rows(2 * rows * options.steps, length, items, devices)
    trainer.fit(module, DataLoader(data, batch_size=share * rows))
    if trainer.is_global_zero:
        print(json.dumps({
            "ms": statistics.median(clock.milliseconds[WARM_UP:]),
            "peak": clock.gib[0],
            "left": clock.gib[1],
            "losses": torch.stack(clock.losses).tolist(),
        }))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="R,T,D,V")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--shape", help="measure a cell of this one in this process")
    parser.add_argument("--cell", choices=CELLS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.cell:
        measured(options)
        return
    found = run_cells([{"shape": shape, "cell": cell} for shape in options.shapes for cell in CELLS], options.out)
    losses = {(row["shape"], row["cell"]): row["losses"] for row in found if "losses" in row}
    for (shape, cell), own in losses.items():
        truth = losses.get((shape, "one device, the rows of both"))
        if cell.startswith("two") and truth:
            apart = max(abs(a - b) / b for a, b in zip(own, truth, strict=True))
            if apart > TOLERANCE:
                sys.exit(f"{shape}, {cell}: losses {apart:.1e} apart from those of one device: nothing of it counts")
            print(f"{shape}, {cell}: losses within {apart:.0e} of one device's")


if __name__ == "__main__":
    main()
