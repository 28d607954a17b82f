"""The processes of ``strategy_cases.assert_as_in_one_process``: fits of its cases; rank 0 saves what each did.

strategy_job.py FOLDER CASE:STRATEGY[:PRECISION] [...]
"""

import os
from pathlib import Path
from typing import Any

import parallel_job
from frozen_cases import fitted
from parallel_job import whole
from ranks import run_command
from strategy_cases import CASES
from torch.distributed.tensor import DTensor

from lit_fused.parallel import FSDP2Strategy
from lit_fused.parallel.collectives import objects_of_ranks

OURS = {"our_fsdp2": lambda: FSDP2Strategy(2, 1), "our_tp": lambda: FSDP2Strategy(1, 2)}
STRATEGIES = parallel_job.STRATEGIES | OURS


def run(text: str, folder: Path) -> dict[str, Any]:
    case, strategy, *precision = text.split(":")
    module, batches = CASES[case]()
    rank, shared = int(os.environ["RANK"]), strategy.endswith(("tp", "pp"))
    options = {"accumulate_grad_batches": 2 if shared else 1, "precision": precision[0] if precision else "32-true"}
    own = batches if shared else batches[rank::2]
    trainer = fitted(folder, module, own, devices=2, strategy=STRATEGIES[strategy](), max_steps=2, **options)
    beside = [p for frozen in module.frozen for p in frozen.model.parameters()]
    return {
        "weights": whole(trainer.strategy, module, lambda p: p, "model"),
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "packing": objects_of_ranks(module.model.packing),
        "divided": [isinstance(p, DTensor) for p in beside],
    }


if __name__ == "__main__":
    run_command(run)
