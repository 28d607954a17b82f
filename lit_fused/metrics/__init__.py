"""Compute metrics of language modelling from sums and counts.

The mean of means is not the mean. So every part of a run adds up *sums* (of nats, of hits, of tokens), and only the
last step, :func:`metrics_from_sums`, divides. :class:`TokenMetrics` accumulates the sums over an epoch and all ranks.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_fused.errors import UserError
from lit_fused.losses import LossOutput
from lit_fused.losses.loss import at_least_float32

_NAMES = {"loss_sum": "loss", "aux_loss_sum": "aux_loss", "correct": "accuracy", "lse_squared": "z"}  # of their means
_SUMS = ("num_tokens", *_NAMES, "entropy", "smoothed_loss", "z_loss", "nll")


def sums_of(output: LossOutput) -> dict[str, Tensor]:
    """Return the detached sums of one batch as float64 scalars.

    Their names are "loss_sum", "num_tokens", "aux_loss_sum", and those of the statistics.
    """
    sums = {"loss_sum": output.loss_sum, "num_tokens": output.num_tokens, **output.stats}
    if output.aux_loss is not None:  # weighted by tokens, as in training
        sums["aux_loss_sum"] = at_least_float32(output.aux_loss) * output.num_tokens
    return {name: value.detach().double() for name, value in sums.items()}


def metrics_from_sums(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Divide sums by the number of tokens, a sum "x/y" by the sum "y". A metric without its sum is left out.

    Returns:
        "loss" (nats), "perplexity" = exp(mean nll), "accuracy" in [0, 1], "entropy" (nats), "z" = mean squared
        log-sum-exp, "aux_loss", and the mean of every other sum under its own name, "x" of "x/y" without "y"; each ()
        float32. Where there is nothing to divide by they are NaN: a zero would be the best of all losses.
    """
    metrics, counts = {}, {name.partition("/")[2] for name in sums}
    for name, total in sums.items():
        metric, _, of = name.partition("/")
        mean = total / sums[of or "num_tokens"]
        if name == "nll":
            metrics["perplexity"] = mean.exp()
        elif name != "num_tokens" and name not in counts:
            metrics[_NAMES.get(metric, metric)] = mean
    return {name: value.float() for name, value in metrics.items()}


class TokenMetrics(Metric):
    """Sums over an evaluation epoch, reduced over ranks by ``compute``. States are float64 scalars.

    Args:
        statistics: names of the loss's own sums, its ``statistics``.
    """

    full_state_update = False
    is_empty = False  # The last epoch computed had batches, and nothing was counted in them.

    def __init__(self, statistics: Sequence[str] = ()) -> None:
        super().__init__()
        self._names = (*_SUMS, *(name for name in statistics if name not in _SUMS))
        for name in self._names:
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
            self.add_state(f"batches_with_{name}", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, output: LossOutput) -> None:
        """Add one batch. Raise a UserError for a statistic that the loss has not named."""
        unknown = sorted(output.stats.keys() - set(self._names))
        if unknown:
            raise UserError(
                f"the loss returned the statistics {', '.join(unknown)}, which all ranks have to know before the first "
                "batch; name them in its class attribute statistics"
            )
        for name, value in sums_of(output).items():
            setattr(self, name, getattr(self, name) + value)
            setattr(self, f"batches_with_{name}", getattr(self, f"batches_with_{name}") + 1)

    def compute(self) -> dict[str, Tensor]:
        """Return :func:`metrics_from_sums` of all batches, without statistics that only some batches had; nothing if
        there was no batch."""
        batches = self.batches_with_num_tokens
        self.is_empty = bool(batches) and not self.num_tokens
        if not batches:
            return {}
        return metrics_from_sums(
            {name: getattr(self, name) for name in self._names if getattr(self, f"batches_with_{name}") == batches}
        )
