"""When a module runs the spot check (heads/spot_check.py), and how its ranks stop together."""

import torch

from lit_fused.errors import UserError
from lit_fused.losses.loss import Batch
from lit_fused.models.language_model import LanguageModel
from lit_fused.ops.label_checks import IGNORE_INDEX
from lit_fused.parallel import Placement


class SpotChecks:
    """Checks the first batch with labels of "training", the first of each "evaluation", and every n-th step of the
    optimiser; 0: none."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.restart()

    def restart(self) -> None:
        """Begin a fit or an evaluation of its own."""
        self.first_due, self._next_step = {"training", "evaluation"}, 0

    def is_due(self, stage: str, step: int) -> bool:
        """Return whether a check is due in the first micro-batch of an optimiser step: the same on all ranks."""
        return bool(self.every) and (stage in self.first_due or (stage == "training" and step >= self._next_step))

    def run(self, stage: str, step: int, model: LanguageModel, batch: Batch, placement: Placement) -> None:
        """Run the check that is due, with a batch that has labels; else leave it to the next one. Ranks that train, or
        run a model together, raise UserError together."""
        together = stage == "training" or placement.is_sharded
        labelled = (model.targets(batch) != IGNORE_INDEX).any().int()
        if not (placement.from_all_ranks(labelled) if together else labelled).any():
            return
        self.first_due.discard(stage)
        if stage == "training":  # Step 99 is the hundredth: a check after it would wait for the copies of a save.
            self._next_step = step + self.every - (step + 1) % self.every
        fault = None
        try:
            placement.spot_check(model, batch)
        except UserError as error:
            fault = error
        if together:
            found = placement.from_all_ranks(torch.tensor(int(fault is not None), device=labelled.device))
            if fault is None and found.any():
                rank = placement.name_of_rank(int(found.argmax()))
                raise UserError(f"the spot check has found a difference on {rank}, which says it")
        if fault is not None:
            raise fault
