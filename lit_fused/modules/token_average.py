"""``TokenAverage``: makes accumulation token-exact.

Lightning averages losses over accumulated micro-batches and over ranks. With ragged labels the mean of means is not the
mean over tokens. So ``training_step`` returns a tensor whose *value* is the batch's mean loss and whose *gradient* is
that of the summed loss over a constant. After the last backward of an optimiser step, every gradient is multiplied by
the one factor that turns these sums into the mean over all valid tokens of the step. The all-reduce that counts the
tokens also sums loss and statistics, so the logged values are exact as well.

A batch counts once its backward begins, so one that ``training_step`` drops by returning None does not. An auxiliary
loss (a router's) is averaged over micro-batches and ranks with their tokens as weights.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_fused.errors import UserError
from lit_fused.losses.loss import LossOutput
from lit_fused.metrics import metrics_from_sums, sums_of
from lit_fused.parallel import Placement, local

# The constant keeps float16 gradients of a long batch finite. It is the same on every rank and in every micro-batch, it
# is a power of two, which rounds nothing, and it cancels in the optimiser step.
_LOSS_DIVISOR = 4096.0

# These operations leave a loss and its gradient as they are: DDP's sink for unused parameters, and copies.
_NEUTRAL = ("_DDPSinkBackward", "CloneBackward0", "AliasBackward0")


class _MeanOfSum(torch.autograd.Function):
    """A batch's mean loss, with a multiple of its sum's gradient. ``count`` is called when backward begins."""

    @staticmethod
    def forward(ctx: Any, summed: Tensor, mean: Tensor, multiple: float, count: Callable[[], None]) -> Tensor:
        ctx.multiple, ctx.count = multiple, count
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Any:
        ctx.count()
        return gradient[0] * ctx.multiple, None, None, None


class TokenAverage:
    """Adds up the sums of an optimiser step's micro-batches, and scales the step's gradients by them."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin a new optimiser step."""
        self.batches = 0  # micro-batches since the last optimiser step
        self.sums: dict[str, Tensor] = {}  # of those whose gradients are there
        self.drop()

    def drop(self) -> None:
        """Forget a micro-batch whose backward has not run."""
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
            summed = summed + output.aux_loss * output.num_tokens
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

    def returned(self, summed: Tensor, accumulated: int) -> Tensor:
        """Return what ``training_step`` returns for a micro-batch with this summed loss, or a pipeline's placeholder.

        Lightning divides it by ``accumulated``, the number of micro-batches of an optimiser step at that time.
        """
        self.batches += 1
        if self._pending is None:
            return summed * (accumulated / _LOSS_DIVISOR)
        (sums, mean), self._pending = self._pending, None
        loss: Any = _MeanOfSum.apply(summed, mean, accumulated / _LOSS_DIVISOR, partial(self._begin_backward, sums))
        self._node = loss.grad_fn
        return loss

    def check_returned(self, loss: Tensor, expected: list[str], module: str) -> None:
        """Refuse to run backward from anything but what :meth:`returned` has returned; do not wait for the device.

        Args:
            loss: what backward is about to run from.
            expected: names of the operations that Lightning has applied to it, the last one first.
            module: the class to name.
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

    def scale(self, gradients: Iterable[Tensor], placement: Placement) -> dict[str, Tensor]:
        """Turn gradients, in place, into those of the mean over the step's tokens, and begin a new step.

        Return the step's metrics: those of :func:`~lit_fused.metrics.metrics_from_sums`.
        """
        names, sums = zip(*self.sums.items(), strict=True)
        self.reset()
        total = dict(zip(names, placement.sum_over_data(torch.stack(sums)), strict=True))
        count = total["num_tokens"].clamp(min=1)
        if "num_items" in total:  # Each micro-batch states the count of the whole step.
            count = total.pop("num_items") / total.pop("batches")
        factor = placement.data_parallel_size * _LOSS_DIVISOR / count
        gradients = [local(g) for g in gradients]
        if gradients:
            torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
        return metrics_from_sums(total)
