"""Compute metrics of language modelling from sums and counts.

The mean of means is not the mean. So every part of a run adds up *sums* (of nats, of hits, of tokens), and only the
last step, :func:`metrics_from_sums`, divides. :class:`TokenMetrics` accumulates the sums over an epoch and all ranks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
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


class StageMetrics(nn.Module):
    """:class:`TokenMetrics` of each stage ("val", "test"), over all of its loaders and, of several, over each.

    Attributes:
        without_labels: of the last :meth:`compute`, what had batches but no label that counts.
    """

    def __init__(self, statistics: Sequence[str] = ()) -> None:
        super().__init__()
        self._statistics = tuple(statistics)
        self._metrics = nn.ModuleDict({stage: TokenMetrics(statistics) for stage in ("val", "test")})
        self.without_labels: list[str] = []

    def update(self, stage: str, loader: int | None, output: LossOutput) -> None:
        """Add one batch of a stage's loader; None if it has only one."""
        for name in (stage, *([] if loader is None else [f"{stage}/dataloader_idx_{loader}"])):
            self._of(name).update(output)

    def _of(self, name: str) -> TokenMetrics:
        if name not in self._metrics:
            like: Any = self._metrics["val"]
            self._metrics[name] = TokenMetrics(self._statistics).to(like.device)
        metrics = self._metrics[name]
        assert isinstance(metrics, TokenMetrics)
        return metrics

    def reset(self, stage: str) -> None:
        """Forget the sums of a stage."""
        for name in [name for name in self._metrics if name.partition("/")[0] == stage]:
            self._of(name).reset()
            if name != stage:
                del self._metrics[name]

    def compute(self, stage: str, loaders: int, names: Sequence[str] | None) -> dict[str, Tensor]:
        """Return a stage's metrics by the names under which they are logged, reduced over all ranks; forget its sums.

        All ranks reduce the sums of the same loaders in the same order, also of those that had no batch here. Those of
        one of several loaders end with its name, or "dataloader_idx_0" where loaders have no ``names``.
        """
        found, self.without_labels = dict[str, Tensor](), []
        suffixes = [f"/dataloader_idx_{index}" for index in range(loaders) if loaders > 1]
        for suffix, name in zip(["", *suffixes], ["", *(names or suffixes)], strict=False):
            shown = f"/{name}" if suffix and names else suffix
            metrics = self._of(stage + suffix)
            found |= {f"{stage}/{metric}{shown}": value for metric, value in metrics.compute().items()}
            if metrics.is_empty:
                self.without_labels.append(stage + shown)
        self.reset(stage)
        return found
