"""The processes of test_preference_ranks.py: a fit of preferences under each strategy; rank 0 saves what it did.

preference_job.py FOLDER CASE [CASE ...], with cases STRATEGY:OBJECTIVE:REFERENCE[:PRECISION]
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from frozen_cases import fitted
from parallel_job import STRATEGIES, whole
from preference_cases import batches_of, module_for

from lit_fused import PreferenceLoss, UserError

REFERENCES = []  # as the loss has seen them


class Watched(PreferenceLoss):
    def of_answers(self, policy, reference, *others, **named):
        REFERENCES.append(reference)
        return super().of_answers(policy, reference, *others, **named)


def main(folder: Path, cases: list[str]) -> None:
    rank = int(os.environ["RANK"])
    for case in cases:
        strategy, objective, reference, *precision = case.split(":")
        module, batches = module_for(objective, reference), batches_of(objective, reference)
        module.model.loss.__class__ = Watched
        shared = strategy in ("tp", "pp")
        options = {"devices": 2, "strategy": STRATEGIES[strategy](), "accumulate_grad_batches": 2 if shared else 1}
        options["precision"] = precision[0] if precision else "32-true"
        REFERENCES.clear()
        try:
            trainer = fitted(folder, module, batches if shared else batches[rank::2], **options)
            found = {name: value.item() for name, value in trainer.callback_metrics.items()}
            result = {"weights": whole(trainer.strategy, module, lambda p: p), "logged": found}
            result["references"] = REFERENCES
        except UserError as refusal:
            result = {"refusal": str(refusal)}
        if rank == 0:
            torch.save(result, folder / f"{case.replace(':', '_')}.pt")
        if dist.is_initialized():
            dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort a process in the interpreter's teardown


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
