"""Compute metrics of language modelling from sums and counts.

The mean of means is not the mean. So every part of a run adds up *sums* (of nats, of hits, of tokens), and only the
last step, :func:`metrics_from_sums`, divides. :class:`TokenMetrics` accumulates the sums over an epoch and all ranks.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_fused.losses import LossOutput

# metric -> the sum that is divided by the number of tokens
_MEANS = {"loss": "loss_sum", "aux_loss": "aux_loss_sum", "accuracy": "correct", "entropy": "entropy"}
_MEANS |= {"z": "lse_squared"} | {name: name for name in ("dropped_mass", "kept_columns", "exact_tokens")}
_SUMS = ("num_tokens", "nll", *_MEANS.values())


def sums_of(output: LossOutput) -> dict[str, Tensor]:
    """Return the detached sums of one batch as float64 scalars.

    Their names are "loss_sum", "num_tokens", "aux_loss_sum", and those of the statistics.
    """
    sums = {"loss_sum": output.loss_sum, "num_tokens": output.num_tokens, **output.stats}
    if output.aux_loss is not None:  # weighted by tokens, as in training
        sums["aux_loss_sum"] = output.aux_loss * output.num_tokens
    return {name: value.detach().double() for name, value in sums.items()}


def metrics_from_sums(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Divide sums by the number of tokens. A metric without its sum is left out.

    Returns:
        "loss" (nats), "perplexity" = exp(mean nll), "accuracy" in [0, 1], "entropy" (nats), "z" = mean squared
        log-sum-exp, "aux_loss", and of a filtered backward, in [0, 1], "dropped_mass", "kept_columns" and
        "exact_tokens", each () float32. All but perplexity (1) are zero when there are no tokens.
    """
    count = sums["num_tokens"].clamp(min=1)
    metrics = {name: sums[total] / count for name, total in _MEANS.items() if total in sums}
    if "nll" in sums:
        metrics["perplexity"] = (sums["nll"] / count).exp()
    return {name: value.float() for name, value in metrics.items()}


class TokenMetrics(Metric):
    """Sums over an evaluation epoch, reduced over ranks by ``compute``. States are float64 scalars."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for name in _SUMS:
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
            self.add_state(f"batches_with_{name}", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, output: LossOutput) -> None:
        """Add one batch."""
        for name, value in sums_of(output).items():
            setattr(self, name, getattr(self, name) + value)
            setattr(self, f"batches_with_{name}", getattr(self, f"batches_with_{name}") + 1)

    def compute(self) -> dict[str, Tensor]:
        """Return :func:`metrics_from_sums` of all batches, without statistics that only some batches had."""
        batches = self.batches_with_num_tokens
        return metrics_from_sums({n: getattr(self, n) for n in _SUMS if getattr(self, f"batches_with_{n}") == batches})
