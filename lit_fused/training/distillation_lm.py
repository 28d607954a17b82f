"""The module of a student that learns the probabilities of a teacher."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_fused.errors import UserError
from lit_fused.objectives.distillation import NO_TEACHER, DistillationLoss, teacher_head
from lit_fused.ops.linear_distillation import check_vocabularies
from lit_fused.training.module import FusedCausalLMModule


class FusedDistillationModule(FusedCausalLMModule):
    """A causal language model that learns the probabilities of another one with the same vocabulary, without logits.

        student, teacher = (AutoModelForCausalLM.from_pretrained(name) for name in (...))
        module = FusedDistillationModule(student, DistillationLoss("jsd", beta=0.5), teacher=teacher)

    It logs the divergence per token and the teacher's own loss (teacher_nll) beside what a
    :class:`~lit_fused.training.module.FusedLMModule` logs, whose other arguments these are.

    Args:
        loss: a :class:`lit_fused.objectives.DistillationLoss`; default: the forward KL alone.
        teacher: a transformers model, which is not trained, saved or exported, and runs without gradients in the dtype
            of its own weights. None: batches have stored scores (``data.scores``, of ``mode=score``).
    """

    loss_class = DistillationLoss
    _needs_loss = "needs a DistillationLoss, got {}; choose loss=distillation, or module=causal_lm without a teacher"

    def __init__(
        self,
        backbone: nn.Module,
        loss: DistillationLoss | None = None,
        optimizer: Optimizer | Callable[..., Optimizer] | None = None,
        scheduler: LRScheduler | Callable[..., LRScheduler] | None = None,
        *,
        teacher: nn.Module | None = None,
        check_every_n_steps: int = 100,
        compile: str = "none",
    ) -> None:
        options: dict[str, Any] = {"check_every_n_steps": check_every_n_steps, "compile": compile}
        super().__init__(backbone, loss, optimizer, scheduler, **options)
        self.teacher = None
        if teacher is not None:
            instead = "store its probabilities with mode=score, and train with data.scores=FILE and teacher=null"
            self.teacher = self.add_frozen(teacher, "teacher", instead)
            assert isinstance(self.model.loss, DistillationLoss)
            self.model.loss.teacher = partial(self.teacher.run, teacher_head, free=False)

    def setup(self, stage: str) -> None:
        stored = self._of_data("stored_scores")
        if self.teacher is None and stored is None and hasattr(self.trainer.datamodule, "stored_scores"):  # type: ignore[attr-defined]
            raise UserError(NO_TEACHER)
        super().setup(stage)
        assert isinstance(self.model.loss, DistillationLoss)
        entries = self.model.vocabulary
        if self.teacher is not None:
            if stored is not None:
                raise UserError(
                    "there are a teacher and stored scores of one (data.scores), which are two teachers; leave one out"
                )
            check_vocabularies(self.teacher.model.vocabulary, entries)
        elif stored is not None:
            self.model.loss.check_stored(stored.header.vocabulary, stored.header.temperature, entries)
