"""The processes of test_several_calls.py: one trainer validates, fits, tests and fits again.

several_calls_job.py FOLDER STRATEGY:MODEL [...]

Rank 0 saves the losses and weights.
"""

from pathlib import Path
from typing import Any

import torch
from checkpoint_job import STRATEGIES
from lightning_helpers import quiet_trainer
from parallel_job import whole
from ranks import run_command
from tiny_models import tiny_model
from torch.utils.data import DataLoader

from lit_fused import FusedCausalLMModule, FusedRecommenderModule, SASRec
from lit_fused.training import FusedLMModule


def module_of(name: str) -> tuple[FusedLMModule, int]:
    """Return a module and the number of its tokens or items."""
    torch.manual_seed(0)
    if name == "sasrec":
        backbone = SASRec(50, hidden_size=16, num_layers=1, num_heads=2, max_length=12, dropout=0.0)
        return FusedRecommenderModule(backbone), 50
    model = tiny_model(name)
    return FusedCausalLMModule(model), model.config.vocab_size


def run(case: str, folder: Path) -> dict[str, Any]:
    strategy, name = case.split(":")
    module, entries = module_of(name)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, entries, (12,), generator=generator) for _ in range(16)]
    batches = DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=4)  # type: ignore[arg-type]
    trainer = quiet_trainer(folder, strategy=STRATEGIES[strategy](), devices=2, max_epochs=1)
    losses = [trainer.validate(module, batches, verbose=False)[0]["val/loss"]]
    trainer.fit(module, batches, batches)
    losses.append(trainer.test(module, batches, verbose=False)[0]["test/loss"])
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, batches, batches)
    losses.append(trainer.validate(module, batches, verbose=False)[0]["val/loss"])
    return {"losses": losses, "weights": whole(trainer.strategy, module, lambda weight: weight)}


if __name__ == "__main__":
    run_command(run)
