"""When a module runs the spot check (heads/spot_check.py), and how its ranks stop together."""

from collections import defaultdict

import torch

from lit_fused.errors import UserError
from lit_fused.losses.loss import Batch, names_of
from lit_fused.models.language_model import LanguageModel
from lit_fused.ops.label_checks import IGNORE_INDEX
from lit_fused.parallel import Placement


class SpotChecks:
    """Checks the first batch with labels of "training", the first of each "evaluation", the first with an entry that
    none had before, and every n-th step of the optimiser; 0: none."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.restart()

    def restart(self) -> None:
        """Begin a fit or an evaluation of its own."""
        self.first_due, self._next_step = {"training", "evaluation"}, 0
        self._names: dict[str, frozenset[str]] = defaultdict(frozenset)  # of entries that were checked, by stage

    def run_if_due(
        self, stage: str, model: LanguageModel, batch: Batch, placement: Placement, step: int | None = 0
    ) -> None:
        """Run the check if one is due; UserError if it finds a difference. ``step`` is that of the optimiser, None but
        for its first micro-batch: then all ranks run the check, and those that train, or run a model together, raise
        together. An entry that is new in one rank's batch is checked on this rank alone, if it has the whole model."""
        if not self.every:
            return
        is_first = stage in self.first_due
        if step is not None and (is_first or (stage == "training" and step >= self._next_step)):
            self._run(stage, model, batch, placement, step)
        elif not is_first and not placement.is_sharded and not names_of(batch) <= self._names[stage]:
            self._names[stage] |= names_of(batch)
            placement.spot_check(model, batch)

    def _run(self, stage: str, model: LanguageModel, batch: Batch, placement: Placement, step: int) -> None:
        together = stage == "training" or placement.is_sharded
        labelled = (model.targets(batch) != IGNORE_INDEX).any().int()
        if not (placement.from_all_ranks(labelled) if together else labelled).any():
            return  # The next batch may have labels.
        self.first_due.discard(stage)
        self._names[stage] |= names_of(batch)
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
