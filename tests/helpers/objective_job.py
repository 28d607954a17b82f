"""The processes of tests of objectives: a fit of a case of objective_cases.py under a strategy; rank 0 saves it.

objective_job.py FOLDER CASE:STRATEGY [CASE:STRATEGY ...]
"""

import os
from pathlib import Path
from typing import Any

from frozen_cases import fitted
from objective_cases import CASES
from parallel_job import STRATEGIES, whole
from ranks import run_command


def run(text: str, folder: Path) -> dict[str, Any]:
    case, _, strategy = text.partition(":")
    module, batches = CASES[case]()
    rank, shared = int(os.environ["RANK"]), strategy in ("tp", "pp")
    options = {"devices": 2, "strategy": STRATEGIES[strategy](), "accumulate_grad_batches": 2 if shared else 1}
    trainer = fitted(folder, module, batches if shared else batches[rank::2], **options)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {"weights": whole(trainer.strategy, module, lambda p: p, "model"), "metrics": metrics}


if __name__ == "__main__":
    run_command(run)
