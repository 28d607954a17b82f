"""Let the rows of a plan's batches be divided by the code of ``strategy=context`` itself. On fake tensors,
what is sent to other devices has the size of what comes from them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor

from lit_fused.context import divided_forward
from lit_fused.context.context_strategy import Context, ContextStrategy, check_model
from lit_fused.context.exchange import Ranks
from lit_fused.losses.loss import Forward
from lit_fused.models.language_model import LanguageModel
from lit_fused.parallel import Placement


class PlannedRanks(Ranks):
    """Ranks that are not there, of whom this is the first."""

    def __init__(self, size: int) -> None:
        self.group, self.name, self.size, self.rank = None, "planned", size, 0

    def whole(self, part: Tensor, length: int) -> Tensor:
        return torch.cat([part] * self.size, 1)[:, :length]


class _PlannedContext(Context):
    def __init__(self, size: int) -> None:
        super().__init__(ContextStrategy(size))
        self._ranks = PlannedRanks(size)

    def forward_pass(self, model: LanguageModel) -> Forward:
        check_model(model)
        return super().forward_pass(model)


@contextmanager
def rows_divided_by(size: int) -> Iterator[None]:
    """Let a device in the block have one of ``size`` parts of each row. A model that is not exact so is not found out,
    as that takes numbers; UserError for one that is refused by name."""
    context = _PlannedContext(size)
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(divided_forward, "check_undivided"))
        for name in ("forward_pass", "evaluate"):
            patches.enter_context(mock.patch.object(Placement, name, getattr(context, name)))
        yield
