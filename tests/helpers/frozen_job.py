"""The processes of test_frozen.py: a fit beside a frozen model under each strategy; rank 0 saves what it did.

frozen_job.py FOLDER STRATEGY [STRATEGY ...]
"""

import os
import sys
from pathlib import Path
from typing import Any

from frozen_cases import fitted, frozen_module, rows
from parallel_job import STRATEGIES, whole
from ranks import or_refusal, run_cases
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def run(strategy: str, folder: Path) -> dict[str, Any]:
    rank, batches, shared = int(os.environ["RANK"]), [rows(2, 1), rows(2, 2)], strategy in ("tp", "pp")
    module = frozen_module()
    frozen = module.frozen[0].model
    if strategy in ("ddp", "tp") and rank:  # The first rank's numbers are those of all.
        for p in frozen.parameters():
            p.data.add_(1)
    options = {"devices": 2, "strategy": STRATEGIES[strategy](), "accumulate_grad_batches": 2 if shared else 1}
    trainer = fitted(folder, module, batches if shared else batches[rank::2], **options)
    return {
        "weights": whole(trainer.strategy, module, lambda p: p),
        "loss": trainer.callback_metrics["train/loss"].item(),
        "val/loss": trainer.callback_metrics["val/loss"].item(),
        "divided": isinstance(frozen, FSDPModule) or any(isinstance(p, DTensor) for p in frozen.parameters()),
        "whole": [name for name, p in frozen.named_parameters() if not isinstance(p, DTensor)],
    }


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    run_cases(lambda strategy: or_refusal(run, strategy, FOLDER), sys.argv[2:], lambda name: FOLDER / f"{name}.pt")
