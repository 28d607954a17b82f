"""The processes of tests of objectives: a fit of a case of objective_cases.py under a strategy; rank 0 saves it.

objective_job.py FOLDER CASE:STRATEGY [CASE:STRATEGY ...]
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from frozen_cases import fitted
from objective_cases import CASES
from parallel_job import STRATEGIES, whole

from lit_fused import UserError


def main(folder: Path, runs: list[str]) -> None:
    rank = int(os.environ["RANK"])
    for run in runs:
        case, _, strategy = run.partition(":")
        module, batches = CASES[case]()
        shared = strategy in ("tp", "pp")
        options = {"devices": 2, "strategy": STRATEGIES[strategy](), "accumulate_grad_batches": 2 if shared else 1}
        try:
            trainer = fitted(folder, module, batches if shared else batches[rank::2], **options)
        except UserError as refusal:
            result = {"refusal": str(refusal)}
        else:
            metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
            result = {"weights": whole(trainer.strategy, module, lambda p: p, "model"), "metrics": metrics}
        if rank == 0:
            torch.save(result, folder / f"{case}-{strategy}.pt")
        if dist.is_initialized():
            dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort a process in the interpreter's teardown


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
