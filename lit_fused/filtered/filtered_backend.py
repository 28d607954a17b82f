"""The filtered backward as a backend: one function that filters every call, and one object that filters where it pays.

N tokens, D hidden, V vocabulary.
"""

from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_fused.errors import UserError, check_number
from lit_fused.filtered.filter_schedule import FilterSchedule
from lit_fused.filtered.filtered_hopper import FilteredHopper
from lit_fused.filtered.filtered_logits import FilteredLogits
from lit_fused.filtered.kept_columns import STATISTICS
from lit_fused.ops import cross_entropy
from lit_fused.ops.backends import chunked
from lit_fused.ops.cross_entropy import loss_of
from lit_fused.ops.hopper.hopper_path import HopperPath
from lit_fused.ops.kernel_path import HeadCall, KernelPath
from lit_fused.ops.label_checks import IGNORE_INDEX
from lit_fused.ops.operators import one_graph_break
from lit_fused.ops.options import LossOptions
from lit_fused.ops.vocabulary_parallel import VocabularyShard

FILTER_EPS = 2**-12
# Smoothing has gradients that are nowhere small.
_OPTIONS = {field.name for field in fields(LossOptions)} - {"label_smoothing", "invariant"}


@one_graph_break
def linear_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    filter_eps: float = FILTER_EPS,
    bias: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    token_weights: Tensor | None = None,
    shard: VocabularyShard | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what :func:`lit_fused.linear_cross_entropy` returns, with an approximate backward.

    Backward computes only columns of the vocabulary in which, among 2048 rows, some probability exceeds ``filter_eps``,
    and corrects for the rest; forward is exact. Exact are also rows in which more than half of 1 - p(target) is in
    smaller probabilities, each alone, and groups that would drop more than a tenth of that. Except for bfloat16 on
    Hopper GPUs, backward waits for the device once. For ``torch.compile`` the call is one graph break.

    Args:
        hidden_states, weight, targets, bias, ignore_index, token_weights, shard, options: those of
            :func:`lit_fused.linear_cross_entropy`, without ``label_smoothing``. Backward always recomputes.
        filter_eps: a probability in [0, 1); 0 drops nothing.

    Returns:
        The loss, and its statistics. Where a gradient is wanted these are also "dropped_mass" (per token, the share of
        1 - p(target) that its group drops), "kept_columns" (the share of columns that are computed for each token) and
        "exact_tokens" (how many are exact, alone or in their group): sums over the valid targets, of the loss's dtype.

    Raises:
        UserError: as :func:`lit_fused.linear_cross_entropy`, or an ``filter_eps`` out of range.
    """
    _check(filter_eps)
    checked = LossOptions(**options)
    if checked.label_smoothing:
        raise UserError(
            f"the filtered backward drops columns of the vocabulary whose probabilities are small, and with "
            f"label_smoothing={checked.label_smoothing} their gradient is not small; lit_fused.linear_cross_entropy "
            "smooths"
        )
    call = HeadCall.here(checked, hidden_states, weight, bias, ignore_index, shard=shard)
    return loss_of(hidden_states, weight, bias, targets, token_weights, _filtered(call, filter_eps))


class Filtered:
    """A backend that filters where it pays, and is ``chunked``, exact and as fast, elsewhere.

    Calls in training are exact at first (15 of them), and again where a trial shows that the model has learned too
    little; small calls on a GPU always are (:class:`~lit_fused.filtered.filter_schedule.FilterSchedule`). An object
    counts the calls of one training; a resumed run begins with exact calls again.

    Args:
        filter_eps: a probability in [0, 1), see :func:`linear_cross_entropy`.
    """

    __name__ = "filtered"
    options, statistics, approximate_backward = _OPTIONS, STATISTICS, True  # of a backend

    def __init__(self, filter_eps: float = FILTER_EPS) -> None:
        _check(filter_eps)
        self.filter_eps, self.schedule = filter_eps, FilterSchedule()

    @one_graph_break
    def __call__(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        bias: Tensor | None = None,
        shard: VocabularyShard | None = None,
        token_weights: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the summed loss of checked inputs, hidden states (N, D) and targets (N,), and its statistics, with
        those of the filter where a gradient is wanted."""
        is_trained = torch.is_grad_enabled() and (hidden_states.requires_grad or weight.requires_grad)
        if not is_trained or not self.schedule.filters(hidden_states, len(weight) if shard is None else shard.largest):
            loss, stats = chunked(
                hidden_states, weight, targets, bias=bias, shard=shard, token_weights=token_weights, **options
            )
        else:
            checked = LossOptions(**{"reduction": "sum", **options})
            call = HeadCall.here(checked, hidden_states, weight, bias, shard=shard, checked=True)
            loss, stats = loss_of(hidden_states, weight, bias, targets, token_weights, _filtered(call, self.filter_eps))
        return loss, self.schedule.noted(stats, (targets >= 0).sum()) if is_trained else stats


linear_cross_entropy.options, linear_cross_entropy.statistics = _OPTIONS, STATISTICS  # type: ignore[attr-defined]
linear_cross_entropy.approximate_backward = True  # type: ignore[attr-defined]


def _check(filter_eps: Any) -> None:
    wanted, hint = "be a probability, at least 0 and below 1", "0.000244 (2**-12) is a usual value"
    check_number("filter_eps", filter_eps, wanted, lambda x: 0 <= x < 1, hint)


def _filtered(call: HeadCall, filter_eps: float) -> HeadCall:
    """Return the call with a filter around the exact path, where a gradient is wanted."""
    if not any(call.wanted):
        return call
    options = replace(call.options, recompute=True)
    return replace(call, options=options, path_of=partial(_filtered_path, filter_eps), own_statistics=STATISTICS)


def _filtered_path(filter_eps: float, hidden_ND: Tensor, weight_VD: Tensor, call: HeadCall) -> KernelPath:
    exact = cross_entropy.exact_path(hidden_ND, weight_VD, call)
    return FilteredHopper(filter_eps) if isinstance(exact, HopperPath) else FilteredLogits(filter_eps, exact.kernels)
