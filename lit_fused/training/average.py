"""Token-exact averages: gradients are sums, and one factor after a step's last backward makes them the mean.

Lightning averages losses over accumulated micro-batches and over ranks. With ragged labels the mean of means is not the
mean over tokens. So ``training_step`` returns a tensor whose *value* is the batch's mean loss and whose *gradient* is
that of the summed loss over :data:`LOSS_DIVISOR`. After the last backward of an optimiser step every gradient is
multiplied by the one factor that turns these sums into the mean over all valid tokens of the step. The all-reduce that
counts the tokens also sums loss and statistics, so the logged values are exact as well.

A batch counts once its backward begins, so one that ``training_step`` drops by returning None does not; nor does one
whose gradients ``zero_grad()`` has dropped before the next backward, with manual optimization. An auxiliary
loss (a router's) is averaged over micro-batches and ranks with their tokens as weights.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lit_fused.losses.loss import LossOutput, at_least_float32
from lit_fused.metrics import metrics_from_sums, sums_of
from lit_fused.parallel import Placement, local

# The constant keeps float16 gradients of a long batch finite. It is the same on every rank and in every micro-batch, it
# is a power of two, which rounds nothing, and it cancels in the optimiser step.
LOSS_DIVISOR = 4096.0

# These operations leave a loss and its gradient as they are: DDP's sink for unused parameters, and copies.
_NEUTRAL = ("_DDPSinkBackward", "CloneBackward0", "AliasBackward0")


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else local(gradient)


def warn_of_hooks(model: nn.Module) -> None:
    """Warn once of hooks on parameters: in each backward they see a sum over tokens, not the gradient of the mean."""
    for name, parameter in model.named_parameters():
        hooks = {**(parameter._backward_hooks or {}), **(parameter._post_accumulate_grad_hooks or {})}
        if any(not getattr(hook, "__module__", "").startswith("lit_fused.") for hook in hooks.values()):
            rank_zero_warn(
                f"a hook of {name} sees sums over the tokens of a micro-batch, times a constant, and not the gradient "
                "of the step's mean: to mask or scale is exact, to clip, to log or to step is not; do this in "
                "on_before_optimizer_step (with manual optimization: after self.average_gradients())"
            )
            return


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
    """Adds up the sums of an optimiser step's micro-batches, and scales the step's gradients by them.

    Attributes:
        sums: of the micro-batches whose backward has begun, by name, () float64 each; empty between steps.
        counted: what the losses of all steps were averaged over, () float64; None before the first step.
    """

    def __init__(self) -> None:
        self.counted: Tensor | None = None
        self.reset()

    def reset(self) -> None:
        """Begin a new optimiser step."""
        self.sums: dict[str, Tensor] = {}
        self.batches = 0
        self._node: Any = None  # of the last loss in the autograd graph

    def returned(self, output: LossOutput, accumulated: int) -> Tensor:
        """Return what ``training_step`` returns for a micro-batch: its mean loss (), with the gradient of its sum.

        Lightning divides it by ``accumulated``, the number of micro-batches of an optimiser step.
        """
        sums, summed = sums_of(output), output.loss_sum
        if output.num_items is not None:  # A micro-batch that states a count states that of the whole step.
            sums["num_items"] = torch.as_tensor(output.num_items, dtype=torch.float64, device=summed.device)
            sums["batches"] = torch.ones_like(sums["num_items"])
        if output.aux_loss is not None:
            summed = summed + at_least_float32(output.aux_loss) * output.num_tokens
        mean, multiple = output.loss.detach(), accumulated / LOSS_DIVISOR
        loss: Any = _MeanOfSum.apply(summed, mean, multiple, partial(self._count, sums))
        self.batches, self._node = self.batches + 1, loss.grad_fn
        return loss

    def _count(self, sums: dict[str, Tensor]) -> None:
        self._node = None  # It would keep the graph's memory.
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def forget_dropped(self, gradients: Iterable[Tensor]) -> None:
        """Forget the micro-batches of this step if their gradients are gone, or zero. Waits for the device if not."""
        if self.sums and not any(_values(gradient).any() for gradient in gradients):
            self.sums = {}

    @property
    def is_pending(self) -> bool:
        """True between :meth:`returned` and the backward of what it returned."""
        return self._node is not None

    def has_changed(self, loss: Tensor, expected: list[str]) -> bool:
        """Return whether a loss is another one than :meth:`returned` has returned, without a look at its value.

        ``expected`` names the operations that Lightning applies to it before backward, the last one first.
        """
        node, found = loss.grad_fn, list[str]()
        while node is not None and node is not self._node and len(found) <= len(expected):
            if node.name() not in _NEUTRAL:
                found.append(node.name())
            node = node.next_functions[0][0] if node.next_functions else None
        return node is None or node is not self._node or found != expected

    @torch.no_grad()
    def scale(self, gradients: Iterable[Tensor], placement: Placement) -> dict[str, Tensor]:
        """Turn gradients, in place, into those of the mean over the tokens of the step on all ranks; return the step's
        metrics, and begin a new one."""
        names, total = [*self.sums], placement.sum_over_data(torch.stack([*self.sums.values()]))
        sums = dict(zip(names, total, strict=True))
        self.reset()
        self.counted = sums["num_tokens"] if self.counted is None else self.counted + sums["num_tokens"]
        count = sums.pop("num_items") / sums.pop("batches") if "num_items" in sums else sums["num_tokens"]
        factor = placement.averaged_ranks * LOSS_DIVISOR / count.where(count != 0, 1)
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for gradient in gradients:
            by_dtype[gradient.dtype].append(local(gradient))
        for dtype, parts in by_dtype.items():  # A factor of another dtype would take a kernel for each of them.
            exact = torch.promote_types(dtype, torch.float32)
            torch._foreach_mul_(parts, factor.to(exact))  # pyright: ignore[reportPrivateImportUsage]
        return metrics_from_sums(sums)
