"""``TokenAverage`` makes accumulation token-exact, and ``TokenExactModule`` uses it in either kind of optimization.

Lightning averages losses over accumulated micro-batches and over ranks. With ragged labels the mean of means is not the
mean over tokens. So ``training_step`` returns a tensor whose *value* is the batch's mean loss and whose *gradient* is
that of the summed loss over a constant. After the last backward of an optimiser step, every gradient is multiplied by
the one factor that turns these sums into the mean over all valid tokens of the step. The all-reduce that counts the
tokens also sums loss and statistics, so the logged values are exact as well. A step of one micro-batch is counted
before its backward, which makes the gradient of the mean at once.

A batch counts once its backward begins, so one that ``training_step`` drops by returning None does not. An auxiliary
loss (a router's) is averaged over micro-batches and ranks with their tokens as weights.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lit_fused.errors import UserError
from lit_fused.losses.loss import LossOutput, at_least_float32
from lit_fused.metrics import metrics_from_sums, sums_of
from lit_fused.parallel import OnTheWay, Placement, clip_to_norm, clip_to_value, gradients_of, local
from lit_fused.training.optimizers import Trained, step_on_parts
from lit_fused.training.placed_lm import PlacedLMModule

# The constant keeps float16 gradients of a long batch finite. It is the same on every rank and in every micro-batch, it
# is a power of two, which rounds nothing, and it cancels in the optimiser step.
_LOSS_DIVISOR = 4096.0

# These operations leave a loss and its gradient as they are: DDP's sink for unused parameters, and copies.
_NEUTRAL = ("_DDPSinkBackward", "CloneBackward0", "AliasBackward0")


class _MeanOfSum(torch.autograd.Function):
    """A batch's mean loss, with a multiple of its sum's gradient. ``count`` is called when backward begins."""

    @staticmethod
    def forward(ctx: Any, summed: Tensor, mean: Tensor, multiple: float | Tensor, count: Callable[[], None]) -> Tensor:
        ctx.multiple, ctx.count = multiple, count
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Any:
        ctx.count()
        return gradient[0] * ctx.multiple, None, None, None


class TokenAverage:
    """Adds up the sums of an optimiser step's micro-batches, and scales the step's gradients by them."""

    def __init__(self) -> None:
        self.counted: Tensor | None = None  # what the losses of all steps were averaged over
        self.reset()

    def reset(self) -> None:
        self.batches = 0  # micro-batches since the last optimiser step
        self.is_mean = False  # The gradients are those of the mean already, and the sums those of all ranks.
        self.sums: dict[str, Tensor] = {}  # of those whose gradients are there
        self.drop()

    def drop(self) -> None:
        self._pending: tuple[dict[str, Tensor], Tensor] | None = None  # its sums and mean loss
        self._node: Any = None  # of its loss in the autograd graph
        self._checked = False  # that backward begins at this loss

    def add(self, output: LossOutput) -> Tensor:
        """Add a micro-batch's sums; return its summed loss, to which an auxiliary loss is added."""
        sums, summed = sums_of(output), output.loss_sum
        if output.num_items is not None:
            sums["num_items"] = torch.as_tensor(output.num_items, dtype=torch.float64, device=summed.device)
            sums["batches"] = torch.ones_like(sums["num_items"])
        if output.aux_loss is not None:
            summed = summed + at_least_float32(output.aux_loss) * output.num_tokens
        if summed.requires_grad:
            self._pending = sums, output.loss.detach()
        else:  # A pipeline has run backward already.
            self._count(sums)
        return summed

    def _begin_backward(self, sums: dict[str, Tensor]) -> None:
        if not self._checked:
            raise UserError(
                "backward from a loss of training_step goes through self.manual_backward(loss), not loss.backward(), "
                "and a method backward(loss) of one's own through super().backward(loss), where a changed loss is seen"
            )
        self._count(sums)
        self.drop()  # The node would keep the graph's memory.

    def _count(self, sums: dict[str, Tensor]) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def returned(self, summed: Tensor, accumulated: int, step_of: Placement | None) -> Tensor:
        """Return what ``training_step`` returns for a micro-batch with this summed loss, or a pipeline's placeholder.

        Lightning divides it by ``accumulated``, the number of micro-batches of an optimiser step at that time. If this
        one and those of the other ranks are a whole step, ``step_of`` is their placement, and backward makes the
        gradient of the mean.
        """
        self.batches += 1
        multiple: float | Tensor = accumulated / _LOSS_DIVISOR
        if self._pending is None:
            return summed * multiple
        (sums, mean), self._pending = self._pending, None
        if step_of is not None:
            sums, self.is_mean = _summed(sums, step_of), True
            multiple = (step_of.data_parallel_size / _count_of(sums)).to(summed.dtype)
        loss: Any = _MeanOfSum.apply(summed, mean, multiple, partial(self._begin_backward, sums))
        self._node = loss.grad_fn
        return loss

    def check_returned(self, loss: Tensor, expected: list[str], module: str) -> None:
        """Refuse to run backward from another loss than :meth:`returned` has returned; do not wait for the device.

        ``expected`` names the operations that Lightning has applied to it, the last one first; ``module`` is its class.
        """
        node, found = loss.grad_fn, []
        while node is not None and node is not self._node and len(found) <= len(expected):
            if node.name() not in _NEUTRAL:
                found.append(node.name())
            node = node.next_functions[0][0] if node.next_functions else None
        if node is None or node is not self._node or found != expected:
            raise UserError(
                f"{module}.training_step must return what super().training_step(...) returned, unchanged (with manual "
                "optimization: give it to manual_backward), because gradients are averaged over the tokens of the "
                "whole step; to change the loss itself, override compute_loss(batch)"
            )
        self._checked = True

    @torch.no_grad()
    def scale(self, gradients: Iterable[Tensor], placement: Placement) -> dict[str, Tensor]:
        """Turn gradients, in place, into those of the mean over the step's tokens; return its metrics, and reset."""
        is_mean, total = self.is_mean, self.sums if self.is_mean else _summed(self.sums, placement)
        self.reset()
        self.counted = total["num_tokens"] if self.counted is None else self.counted + total["num_tokens"]
        factor = placement.data_parallel_size * _LOSS_DIVISOR / _count_of(total)
        metrics = metrics_from_sums({name: s for name, s in total.items() if name not in ("num_items", "batches")})
        if is_mean:
            return metrics
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for gradient in gradients:
            by_dtype[gradient.dtype].append(local(gradient))
        for dtype, parts in by_dtype.items():  # A factor of another dtype would take a kernel for each of them.
            exact = torch.promote_types(dtype, torch.float32)
            torch._foreach_mul_(parts, factor.to(exact))  # pyright: ignore[reportPrivateImportUsage]
        return metrics


def _summed(sums: Mapping[str, Tensor], placement: Placement) -> dict[str, Tensor]:
    """Return the sums over the ranks that train on different data, by one all-reduce."""
    return dict(zip(sums, placement.sum_over_data(torch.stack([*sums.values()])), strict=True))


def _count_of(sums: Mapping[str, Tensor]) -> Tensor:
    """Return what a step's summed loss is divided by: the number of tokens, or what its micro-batches state."""
    # A micro-batch that states a count states that of the whole step.
    count = sums["num_items"] / sums["batches"] if "num_items" in sums else sums["num_tokens"]
    return count.where(count != 0, 1)


class TokenExactModule(PlacedLMModule):
    """Averages gradients between the last backward of an optimiser step and the hooks that see them."""

    def __init__(self) -> None:
        super().__init__()
        self.average = TokenAverage()
        self.trained = Trained()
        self._guarded: list[Optimizer] = []  # optimisers whose steps are watched
        self._hooks: list[RemovableHandle] = []  # of optimisers, which a project may have given and keeps
        self._to_step: set[Optimizer] = set()  # those whose gradients are averaged
        self._others = False  # Gradients of another loss wait for a step.
        self._seen: tuple[list[tuple[Tensor, int]], Tensor] | None = None  # gradients, their versions, their norm
        self.gradient_norms: list[Tensor] = []  # of the gradients of this optimiser step, by optimiser
        self._loss_for_bar: OnTheWay | None = None  # of the last step

    def average_gradients(self) -> None:
        """Turn the gradients of all backward passes since the last optimiser step, in place, into those of the mean
        over all their tokens, on all ranks together; log the step as ``train/loss`` and so on.

        Only manual optimization (``automatic_optimization = False``) has to call this, once per optimiser step: after
        the last ``self.manual_backward(loss)``, with the loss of ``super().training_step(...)`` undivided, and before
        ``self.clip_gradients`` and the steps of the optimisers. Gradients of parameters that no optimiser has stay as
        they are, and an optimiser that ``configure_optimizers`` has not returned is refused if it steps with them.

        Raises:
            UserError: an optimiser has not stepped since the last call, or others have replaced its parameters.
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
        self.placement.finish_gradients()
        self.trained.check(self)
        gradients = gradients_of(self.trainer.optimizers)
        metrics = self.average.scale(gradients, self.placement)
        if not self.automatic_optimization:
            self._log_norm(gradients, is_scaled=True)
        self._log_loss(metrics.pop("loss"))
        self.log_dict({f"train/{name}": value for name, value in metrics.items()})

    def _log_loss(self, loss: Tensor) -> None:
        # Lightning reads what is logged with prog_bar in every step, with or without a bar, and a GPU would have no
        # work meanwhile. So a bar gets the loss of the step before, which has come by itself.
        bar = self.trainer.progress_bar_callback
        self.log("train/loss", loss, prog_bar=not loss.is_cuda)
        if loss.is_cuda and bar is not None:
            before, self._loss_for_bar = self._loss_for_bar, OnTheWay(loss.reshape(1), over_ranks=False)
            if before is not None:
                self.trainer.progress_bar_metrics["train/loss"] = before.read()[0]

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if self.automatic_optimization:  # A fused optimiser takes the loss scale away itself.
            self._log_norm(gradients_of([optimizer]), is_scaled=getattr(optimizer, "_step_supports_amp_scaling", False))

    def _log_norm(self, gradients: list[Tensor], *, is_scaled: bool) -> None:
        norm, scaler = self._norm_of(gradients), getattr(self.trainer.precision_plugin, "scaler", None)
        self.gradient_norms.append(norm)
        if is_scaled and scaler is not None and scaler.is_enabled():  # The scale is on the device, and stays there.
            norm = norm / scaler.scale(torch.ones_like(norm))
        self.log("train/gradient_norm", norm)

    @torch.no_grad()
    def _norm_of(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of some gradients, which is taken once unless a hook has changed one of them."""
        versions = [(gradient, local(gradient)._version) for gradient in gradients]
        before, norm = self._seen or ([], None)
        same = [g is h and v == w for (g, v), (h, w) in zip(before, versions, strict=False)]
        if norm is None or len(before) != len(versions) or not all(same):
            norm = self.placement.gradient_norm(gradients)
        self._seen = versions, norm
        return norm

    def forget_steps(self) -> None:
        """Forget what an earlier run of steps has left: one that an exception ended left it in the middle of a step."""
        self.average.reset()
        self._to_step, self._others, self._seen = set(), False, None
        self.gradient_norms, self._loss_for_bar = [], None

    def release_optimizers(self) -> None:
        """Take the hooks of a fit off its optimisers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._guarded = [], []

    def begin_batch(self) -> None:
        """Prepare for a micro-batch: begin a new optimiser step if Lightning does.

        Raises:
            UserError: the gradients of the last optimiser step would be added to this one's.
        """
        self.average.drop()
        self._seen = None
        if not self.average.batches:
            self.gradient_norms = []
        if self.trained.optimizers != self.trainer.optimizers:
            self.trained.note(self, self.trainer.optimizers)
        if self._guarded != self.trainer.optimizers:
            self._guarded, self._to_step, self._loss_for_bar = list(self.trainer.optimizers), set(), None
            for optimizer in self._guarded:
                self._hooks.append(optimizer.register_step_post_hook(self._check_stepped))
                step_on_parts(optimizer)
        if self._others:
            raise UserError(
                f"{type(self).__name__} ran backward from another loss before super().training_step(...), and "
                "average_gradients() would scale its gradients as well; step their optimiser first, or add that loss "
                "in compute_loss(batch)"
            )
        if not self.automatic_optimization:
            return
        accumulated = self.trainer.accumulate_grad_batches
        index = self.trainer.fit_loop.batch_idx
        if index % accumulated == 0:
            self.average.reset()
            if not self._others_see_gradients():  # Lightning frees them later, beside the memory of forward.
                for optimizer in self._guarded:
                    self.optimizer_zero_grad(self.trainer.current_epoch, index, optimizer)
        elif not self.average.batches and gradients_of(self._guarded):
            raise UserError(
                f"accumulate_grad_batches became {accumulated} at batch {index}, which is no "
                "multiple of it: Lightning would add the gradients of the last step to those of this one. Change it "
                "at the beginning of an epoch (GradientAccumulationScheduler)"
            )

    def _others_see_gradients(self) -> bool:
        """Return whether a hook looks at the last step's gradients before Lightning frees them."""
        of_module = is_overridden("on_before_zero_grad", self, L.LightningModule)
        callbacks: list[L.Callback] = self.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        return of_module or any(is_overridden("on_before_zero_grad", c, L.Callback) for c in callbacks)

    def _check_stepped(self, optimizer: Optimizer, *_: Any) -> None:
        self._to_step.discard(optimizer)
        self._others = False
        self._seen = None  # It would keep the gradients' memory.
        if self.average.sums:
            raise UserError(
                f"an optimiser of {type(self).__name__} stepped with sums for gradients; call self.average_gradients() "
                "once after the last backward of each optimiser step, before clipping and optimizer.step()"
            )

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward from what ``training_step`` returned; after the last micro-batch of a step, average."""
        automatic, scaler = self.automatic_optimization, getattr(self.trainer.precision_plugin, "scaler", None)
        if not loss.requires_grad and not any(p.requires_grad for p in self.parameters()):
            raise UserError(
                f"no parameter of {type(self).__name__} requires a gradient any more: nothing is trained. Leave some "
                "out of what a callback freezes (BackboneFinetuning freezes all of a module's backbone)"
            )
        expected = ["MulBackward0"] * (scaler is not None and scaler.is_enabled()) + ["DivBackward0"] * automatic
        of_step = automatic or bool(self.average.batches)
        if of_step:
            self.average.check_returned(loss, expected, type(self).__name__)
        else:
            self._others = True
        makes_sums = of_step and not self.average.is_mean
        with self.placement.running(self.model), self.trained.backward() if makes_sums else nullcontext():
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
        """Clip as Lightning does, where it can: not a sharded model's gradients, some of which may be distributed over
        other ranks than others, and in mixed precision not those of a fused optimiser, which it takes for scaled ones
        even if there is no loss scale."""
        plugin, by_value = self.trainer.precision_plugin, gradient_clip_algorithm == "value"
        scaled = getattr(plugin, "scaler", None) is not None
        apart = getattr(optimizer, "_step_supports_amp_scaling", False) and not scaled
        if gradient_clip_val and (apart or self.is_sharded):
            gradients = gradients_of([optimizer])
            if by_value:
                clip_to_value(gradients, gradient_clip_val)
            else:
                clip_to_norm(gradients, self._norm_of(gradients), gradient_clip_val)
        else:
            super().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
