"""``TokenAverage``: makes accumulation token-exact.

Lightning averages losses over accumulated micro-batches and over ranks. With ragged labels the mean of means is not the
mean over tokens. So ``training_step`` returns the *summed* loss over a constant, Lightning averages that as it likes,
and once per optimiser step, after the last backward and before unscaling and clipping, every gradient is multiplied by
the one factor that turns the average into the mean over all valid tokens of the step. The all-reduce that counts the
tokens also sums loss and statistics, so the logged values are exact as well.

An auxiliary loss (a router's) is averaged over micro-batches and ranks with their tokens as weights.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from lit_fused.errors import UserError
from lit_fused.losses.loss import LossOutput
from lit_fused.metrics import metrics_from_sums, sums_of
from lit_fused.parallel import Placement, local

# The constant keeps float16 gradients of a long batch finite. It is the same on every rank and in every micro-batch, it
# is a power of two, which rounds nothing, and it cancels in the optimiser step.
_LOSS_DIVISOR = 4096.0


class TokenAverage:
    """Adds up the sums of an optimiser step's micro-batches, and scales the step's gradients by them."""

    def __init__(self) -> None:
        self._checked = False  # that Lightning got what training_step was to return
        self.reset()

    def reset(self) -> None:
        self.batches = 0  # micro-batches since the last optimiser step
        self._sums: dict[str, Tensor] = {}
        self._returned: Tensor | None = None  # by the last training_step

    def add(self, output: LossOutput) -> Tensor:
        """Add a micro-batch's sums; return its summed loss, to which an auxiliary loss is added."""
        sums = sums_of(output)
        if output.num_items is not None:
            sums["num_items"] = torch.as_tensor(output.num_items, dtype=torch.float64, device=output.loss_sum.device)
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        if output.aux_loss is None:
            return output.loss_sum
        return output.loss_sum + output.aux_loss * output.num_tokens

    def returned(self, summed_loss: Tensor) -> Tensor:
        """Return what ``training_step`` returns for a micro-batch with this summed loss."""
        self.batches += 1
        self._returned = summed_loss / _LOSS_DIVISOR
        return self._returned

    def check_returned(self, averaged: Tensor | None, accumulated: int, module: str) -> None:
        """Refuse a ``training_step`` that returned a loss of its own, which the step's factor would scale wrongly.

        ``averaged`` is what Lightning made of it, over the ``accumulated`` micro-batches; ``module`` names the class.
        Compares values, and so waits for a GPU, in the first optimiser step only.
        """
        if self._sums and self._checked and averaged is not None:
            return
        expected = self._returned / accumulated if self._returned is not None else None
        if not self._sums or averaged is None or expected is None or not torch.equal(averaged, expected):
            raise UserError(
                f"{module}.training_step must return what super().training_step(...) returned, the summed loss, which "
                "is averaged over the tokens of the whole step; to change the loss itself, override compute_loss(batch)"
            )
        self._checked = True

    def scale(self, gradients: Iterable[Tensor], placement: Placement, accumulated: int) -> dict[str, Tensor]:
        """Turn Lightning's average of gradients, in place, into the mean over the step's tokens, and begin a new step.
        Return the step's metrics: those of :func:`~lit_fused.metrics.metrics_from_sums`."""
        names, sums = zip(*self._sums.items(), strict=True)
        batches = self.batches * placement.data_parallel_size
        self.reset()
        total = dict(zip(names, placement.sum_over_data(torch.stack(sums)), strict=True))
        averaged_over = placement.data_parallel_size * accumulated
        count = total["num_tokens"].clamp(min=1)
        if "num_items" in total:  # Each micro-batch states that of the whole step.
            count = total.pop("num_items") / batches
        factor = averaged_over * _LOSS_DIVISOR / count
        torch._foreach_mul_([local(g) for g in gradients], factor)  # pyright: ignore[reportPrivateImportUsage]
        return metrics_from_sums(total)
