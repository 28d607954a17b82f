"""A LightningModule whose gradients are averaged over all tokens of an optimiser step, automatic or manual."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lit_fused.errors import UserError
from lit_fused.modules.placed_lm import PlacedLMModule
from lit_fused.modules.token_average import TokenAverage
from lit_fused.parallel import gradients_of


class TokenExactModule(PlacedLMModule):
    """Averages gradients between the last backward of an optimiser step and the hooks that see them."""

    def __init__(self) -> None:
        super().__init__()
        self.average = TokenAverage()
        self._guarded: list[Optimizer] = []  # optimisers whose steps are watched
        self._to_step: set[Optimizer] = set()  # those whose gradients are averaged
        self._others = False  # Gradients of another loss wait for a step.

    def average_gradients(self) -> None:
        """Turn the gradients of all backward passes since the last optimiser step, in place, into those of the mean
        over all their tokens, on all ranks together; log the step as ``train/loss`` and so on.

        Only manual optimization (``automatic_optimization = False``) has to call this, once per optimiser step: after
        the last ``self.manual_backward(loss)``, with the loss of ``super().training_step(...)`` undivided, and before
        ``self.clip_gradients`` and the steps of the optimisers. Gradients of parameters that no optimiser has stay as
        they are.

        Raises:
            UserError: an optimiser has not stepped since the last call.
        """
        if not self.average.sums:  # No micro-batch of this step ran backward.
            self.average.reset()
            return
        if self._to_step:
            raise UserError(
                "average_gradients() was called twice without a step of every optimiser in between, whose gradients "
                "would be scaled twice; call it once for each optimiser step"
            )
        if not self.automatic_optimization:
            self._to_step = {optimizer for optimizer in self._guarded if gradients_of([optimizer])}
        self.refuse_changed_head(always=False)
        metrics = self.average.scale(gradients_of(self.trainer.optimizers), self.placement)
        self.log("train/loss", metrics.pop("loss"), prog_bar=True)
        self.log_dict({f"train/{name}": value for name, value in metrics.items()})

    def begin_batch(self) -> None:
        """Prepare for a micro-batch: begin a new optimiser step if Lightning does.

        Raises:
            UserError: the gradients of the last optimiser step would be added to this one's.
        """
        self.average.drop()
        if self._guarded != self.trainer.optimizers:
            self._guarded, self._to_step = list(self.trainer.optimizers), set()
            for optimizer in self._guarded:
                optimizer.register_step_post_hook(self._check_stepped)
        if self._others:
            raise UserError(
                f"{type(self).__name__} ran backward from another loss before super().training_step(...), and "
                "average_gradients() would scale its gradients as well; step their optimiser first, or add that loss "
                "in compute_loss(batch)"
            )
        if not self.automatic_optimization:
            return
        accumulated = self.trainer.accumulate_grad_batches
        if self.trainer.fit_loop.batch_idx % accumulated == 0:  # Lightning sets the gradients to zero.
            self.average.reset()
        elif not self.average.batches and gradients_of(self._guarded):
            raise UserError(
                f"accumulate_grad_batches became {accumulated} at batch {self.trainer.fit_loop.batch_idx}, which is "
                "no multiple of it: Lightning would add the gradients of the last step to those of this one. Change it "
                "at the beginning of an epoch (GradientAccumulationScheduler)"
            )

    def _check_stepped(self, optimizer: Optimizer, *_: Any) -> None:
        self._to_step.discard(optimizer)
        self._others = False
        if self.average.sums:
            raise UserError(
                f"an optimiser of {type(self).__name__} stepped with sums for gradients; call self.average_gradients() "
                "once after the last backward of each optimiser step, before clipping and optimizer.step()"
            )

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward from what ``training_step`` returned; after the last micro-batch of a step, average."""
        automatic, scaler = self.automatic_optimization, getattr(self.trainer.precision_plugin, "scaler", None)
        expected = ["MulBackward0"] * (scaler is not None and scaler.is_enabled()) + ["DivBackward0"] * automatic
        if automatic or self.average.batches:
            self.average.check_returned(loss, expected, type(self).__name__)
        else:
            self._others = True
        super().backward(loss, *args, **kwargs)
        if automatic and not self.trainer.fit_loop._should_accumulate():
            self._current_fx_name = "optimizer_step"  # It has one name for all steps, to which metrics are logged.
            self.average_gradients()

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        assert optimizer_closure is not None

        def closure() -> Any:
            loss = optimizer_closure()
            self.average_gradients()  # unless backward has: that of a pipeline, and of a last micro-batch without any
            return loss

        super().optimizer_step(epoch, batch_idx, optimizer, closure)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip as Lightning does. It cannot clip a sharded model's gradients by their norm, so the placement does."""
        if gradient_clip_val and gradient_clip_algorithm != "value" and self.is_sharded:
            self.placement.clip_by_norm(gradients_of([optimizer]), gradient_clip_val)
        else:
            super().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
