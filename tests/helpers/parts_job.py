"""The ranks of tests/parallel/test_parts_of_a_model.py: a fit of a model of which a batch needs only parts.

parts_job.py FOLDER CASE [CASE ...], with cases STRATEGY:MODEL:BATCHES; rank 0 saves what it did
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from parallel_job import STRATEGIES, whole
from ranks import or_refusal, run_cases
from torch import nn
from transformers import get_constant_schedule
from vision_cases import batch_of, tiny

from lit_fused import FusedCausalLMModule

IMAGES = {  # by rank, batch and row
    "images everywhere": ([[1, 1], [2, 0, 1]], [[1], [0, 2]]),
    "no images on one rank": ([[1, 1], [0, 0]], [[0, 0], [1, 0]]),
}


def batches_of(rank: int, model: str, batches: str) -> list[dict[str, Any]]:
    if batches == "one step":
        return ragged_batches(1, seed=rank)
    return [batch_of(model, rows, 14, seed=10 * rank + n) for n, rows in enumerate(IMAGES[batches][rank])]


def fit(folder: Path, model: str, batches: list[dict[str, Any]], **options: Any) -> tuple[L.Trainer, Any]:
    backbone = tiny_llama() if model == "unused" else tiny(model)
    if model == "unused":
        backbone.extra = nn.Linear(2, 2)
    module = FusedCausalLMModule(backbone, None, partial(torch.optim.SGD, lr=0.1), get_constant_schedule)
    trainer = quiet_trainer(folder, max_epochs=1, use_distributed_sampler=False, **options)
    trainer.fit(module, loader(batches), loader(batches))
    return trainer, module


def run(case: str, folder: Path) -> dict[str, Any]:
    strategy, model, batches = case.split(":")
    chosen: Any = {"devices": 2, "strategy": STRATEGIES[strategy]()}
    trainer, module = fit(folder, model, batches_of(int(os.environ["RANK"]), model, batches), **chosen)
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {"weights": whole(trainer.strategy, module, lambda p: p), "logged": logged}


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    run_cases(lambda case: or_refusal(run, case, FOLDER), sys.argv[2:], lambda case: FOLDER / f"{case}.pt")
