"""The processes of test_frozen.py: a fit beside a frozen model under each strategy; rank 0 saves what it did.

frozen_job.py FOLDER STRATEGY [STRATEGY ...]
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from frozen_cases import fitted, frozen_module, rows
from parallel_job import STRATEGIES, whole
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lit_fused import UserError


def main(folder: Path, strategies: list[str]) -> None:
    rank = int(os.environ["RANK"])
    for strategy in strategies:
        batches = [rows(2, 1), rows(2, 2)]
        shared = strategy in ("tp", "pp")
        module = frozen_module()
        frozen = module.frozen[0].model
        if strategy in ("ddp", "tp") and rank:  # The first rank's numbers are those of all.
            for p in frozen.parameters():
                p.data.add_(1)
        options = {"devices": 2, "strategy": STRATEGIES[strategy](), "accumulate_grad_batches": 2 if shared else 1}
        try:
            trainer = fitted(folder, module, batches if shared else batches[rank::2], **options)
        except UserError as refusal:
            result = {"refusal": str(refusal)}
        else:
            result = {
                "weights": whole(trainer.strategy, module, lambda p: p),
                "loss": trainer.callback_metrics["train/loss"].item(),
                "val/loss": trainer.callback_metrics["val/loss"].item(),
                "divided": isinstance(frozen, FSDPModule) or any(isinstance(p, DTensor) for p in frozen.parameters()),
                "whole": [name for name, p in frozen.named_parameters() if not isinstance(p, DTensor)],
            }
        if rank == 0:
            torch.save(result, folder / f"{strategy}.pt")
        if dist.is_initialized():
            dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort a process in the interpreter's teardown


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
