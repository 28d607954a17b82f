"""The processes of test_preference_ranks.py: a fit of preferences under each strategy; rank 0 saves what it did.

preference_job.py FOLDER CASE [CASE ...], with cases STRATEGY:OBJECTIVE:REFERENCE[:PRECISION]
"""

import os
from pathlib import Path
from typing import Any

from frozen_cases import fitted
from parallel_job import STRATEGIES, whole
from preference_cases import batches_of, module_for
from ranks import run_command

from lit_fused import PreferenceLoss

REFERENCES = []  # as the loss has seen them


class Watched(PreferenceLoss):
    def of_answers(self, policy, reference, *others, **named):
        REFERENCES.append(reference)
        return super().of_answers(policy, reference, *others, **named)


def run(case: str, folder: Path) -> dict[str, Any]:
    strategy, objective, reference, *precision = case.split(":")
    module, batches = module_for(objective, reference), batches_of(objective, reference)
    module.model.loss.__class__ = Watched
    rank, shared = int(os.environ["RANK"]), strategy in ("tp", "pp")
    options = {"devices": 2, "strategy": STRATEGIES[strategy](), "accumulate_grad_batches": 2 if shared else 1}
    options["precision"] = precision[0] if precision else "32-true"
    REFERENCES.clear()
    trainer = fitted(folder, module, batches if shared else batches[rank::2], **options)
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    weights = whole(trainer.strategy, module, lambda p: p)
    return {"weights": weights, "logged": logged, "references": REFERENCES}


if __name__ == "__main__":
    run_command(run)
