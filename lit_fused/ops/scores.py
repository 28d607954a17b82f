"""Numbers per token that training needs of an output layer, with gradients, and without its logits.

All but ``top1`` are functions of a row of logits x through its log-sum-exp. With p = softmax(x), H the entropy, s the
selected entries and g_* the incoming gradients, the gradient of a logit is

    dx_v = p_v (a + b log p_v) + g_log_prob [v = target] + sum_k g_k [v = s_k]
    a = g_lse - g_log_prob - sum_k g_k - H g_entropy,    b = -g_entropy

so that two numbers per row and one computation of the logits in backward serve every combination: 8NDV operations, as
many as a loss per token needs.

N tokens, D hidden, V vocabulary, K selected entries per token.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cross_entropy
from .first_derivatives import without_second_derivatives
from .frozen_columns import whole_weight
from .kernel_path import Chosen, HeadCall, KnownRows, LogitsGradient, Rows
from .label_checks import IGNORE_INDEX, check_selected
from .operators import empty_rows, gradient_shapes, one_graph_break, operator
from .options import LossOptions
from .user_error import check_switches
from .vocabulary_parallel import VocabularyShard


class TokenScores(NamedTuple):
    """Numbers of each token, zero where its target is ignored. float32; float64 for float64 hidden states."""

    log_prob: Tensor
    lse: Tensor
    entropy: Any  # Tensor, or None if it was not asked for
    selected: Any  # so too
    top1: Tensor


def token_scores(
    hidden_states: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    selected: Tensor | None = None,
    entropy: bool = True,
    *,
    ignore_index: int = IGNORE_INDEX,
    drop_ignored: bool = False,
    float32_accumulation: bool | None = None,
    logits_budget_mib: float | None = None,
    chunk_size: int | None = None,
    invariant: bool = False,
    shard: VocabularyShard | None = None,
) -> TokenScores:
    """Return log-probability, log-sum-exp, entropy and chosen log-probabilities of each token, all differentiable.

    The logits are ``softcap(scale * hidden_states @ weight.T + bias)``; a temperature T is ``scale=1 / T``. Anything
    that weighs tokens or classes multiplies the results: with ``w`` of shape (V,), ``-(w[targets] * scores.log_prob)``
    is the loss of weighted classes. The options that are not listed here are those of
    :func:`lit_fused.ops.linear_cross_entropy`.

    Args:
        hidden_states: (..., D) floating point, the output layer's input.
        weight: (V, D).
        targets: (...) integer class indices in [0, V), or ``ignore_index``: already shifted.
        bias: (V,) added to the scaled products.
        scale: factor on the products.
        softcap: c > 0 of ``c * tanh(x / c)``, or None for no cap.
        selected: (..., K) integer entries of the vocabulary, -1 for none.
        entropy: also return the entropy.

    Returns:
        A named tuple of tensors (...): ``log_prob`` of the target, ``lse``, ``entropy`` (nats; None if not asked for),
        ``selected`` (..., K) the log-probabilities of the selected entries, zero for -1 (None if not asked for), and
        ``top1``, int64 and without gradient: the entry of the largest logit, -1 where the target is ignored. Numbers of
        ignored tokens are zero.

    Raises:
        UserError: shapes, dtypes, devices or options that do not fit, or entries outside of the vocabulary. In a second
            derivative: there is none.
    """
    check_switches({"entropy": bool}, {"entropy": entropy})
    options = LossOptions(
        scale=scale,
        softcap=softcap,
        reduction="none",
        statistics=entropy,
        drop_ignored=drop_ignored,
        float32_accumulation=float32_accumulation,
        logits_budget_mib=logits_budget_mib,
        chunk_size=chunk_size,
        invariant=invariant,
    )
    weight = whole_weight(weight) if invariant else weight
    call = HeadCall.here(options, hidden_states, weight, bias, ignore_index, shard=shard, top1=True)
    if shard is not None or call.frozen is not None:
        apply: Any = _apply_outside_of_a_graph
    else:  # A compiler cannot trace an autograd function of which no gradient is wanted.
        traceable = any(call.wanted) or not torch.compiler.is_compiling()
        apply = _TokenScores.apply if traceable else _TokenScores.forward
    log_prob, lse, entropies, chosen, top1 = apply(hidden_states, weight, bias, targets, selected, call)
    return TokenScores(log_prob, lse, entropies if entropy else None, None if selected is None else chosen, top1)


class _TokenScores(torch.autograd.Function):
    """Eager and compiled calls have this one; compiled, ``_forward`` and ``_backward`` are operators."""

    @staticmethod
    def forward(*tensors_and_call: Any) -> tuple[Tensor, ...]:
        forward = _forward_operator if torch.compiler.is_compiling() else _forward
        return tuple(forward(*tensors_and_call))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.call = inputs
        *numbers, top1 = output
        ctx.mark_non_differentiable(top1)
        ctx.save_for_backward(*tensors, *numbers)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors  # A checkpoint gives them once.
        backward = _backward_operator if torch.compiler.is_compiling() else _backward
        found = without_second_derivatives(
            lambda: backward(*grads[:4], *saved[5:], *saved[:5], ctx.call), *saved[:3], *grads
        )
        return *ctx.call.in_places(found), None, None, None


_apply_outside_of_a_graph = one_graph_break(_TokenScores.apply)


def _forward(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    selected: Tensor | None,
    call: HeadCall,
) -> list[Tensor]:
    """Return the five scores in the shape of the targets, none of the selected entries where none are asked for."""
    call = replace(call, top1=True)
    rows = Rows(hidden_states, weight, bias, targets, call, cross_entropy.exact_path)
    inputs, call, targets_N = rows.inputs, rows.call, rows.inputs.targets_N
    with torch.autocast(hidden_states.device.type, enabled=False):
        found = rows.path.forward(inputs, None, call).rows
        chosen_NK = found.lse.new_zeros(len(targets_N), 0)
        if selected is not None:
            check_selected(selected, targets, call.vocabulary)
            selected_NK = rows.of(selected.long())
            exists_NK = (selected_NK >= 0) & (targets_N >= 0)[:, None]
            chosen_NK = (rows.path.logits_of(selected_NK, inputs, call) - found.lse[:, None]).where(exists_NK, 0)
            chosen_NK = chosen_NK.where(selected_NK != targets_N[:, None], -found.nll[:, None])
    assert found.top1 is not None
    numbers = [rows.placed(number) for number in (-found.nll, found.lse, found.entropy, chosen_NK)]
    return [*numbers, rows.placed(found.top1, otherwise=-1)]


def _backward(*tensors_and_call: Any) -> list[Tensor]:
    """Return the gradients that are wanted, given those of the four scores that have one, these scores, and the
    tensors and the call of ``_forward``."""
    *tensors, call = tensors_and_call
    grads, scores, (hidden_states, weight, bias, targets, selected) = tensors[:4], tensors[4:8], tensors[8:]
    call = replace(call, checked=True, top1=True)
    rows = Rows(hidden_states, weight, bias, targets, call, cross_entropy.exact_path)
    selected_NK = None if selected is None else rows.of(selected.long())
    of_rows = [None if grad is None else rows.of(grad) for grad in grads]
    known = _known(rows.inputs.targets_N, selected_NK, [rows.of(score) for score in scores], of_rows, rows.call)
    with torch.autocast(hidden_states.device.type, enabled=False):
        found = rows.path.backward(rows.inputs, known, (), rows.call)
    return rows.wanted(found, hidden_states, (hidden_states.dtype, weight.dtype, None if bias is None else bias.dtype))


def _forward_shapes(*tensors_and_call: Any) -> list[Tensor]:
    *_, targets, selected, call = tensors_and_call
    chosen = empty_rows(targets, call, 0 if selected is None else selected.shape[-1])
    return [*(empty_rows(targets, call) for _ in range(3)), chosen, empty_rows(targets, call, dtype=torch.int64)]


_forward_operator = operator("token_scores", 5, _forward, _forward_shapes)
_backward_operator = operator("token_scores_backward", 13, _backward, gradient_shapes)


def _known(
    targets_N: Tensor,
    selected_NK: Tensor | None,
    scores: Sequence[Any],
    grads: Sequence[Tensor | None],
    call: HeadCall,
) -> KnownRows:
    """Return what backward needs of each row: the gradient of its logits, by the formulas at the top of this file."""
    log_prob_N, lse_N, entropy_N, selected_lp_NK = scores
    valid_N = targets_N >= 0
    grad_log_prob_N, grad_lse_N, grad_entropy_N = (
        torch.zeros_like(lse_N) if grad is None else grad.where(valid_N, 0) for grad in grads[:3]
    )
    base_N, target_N = grad_lse_N - grad_log_prob_N, grad_log_prob_N
    slope_N = None
    if grads[2] is not None:
        base_N, slope_N = base_N - entropy_N * grad_entropy_N, -grad_entropy_N
    chosen = None
    if selected_NK is not None and selected_NK.shape[1] and grads[3] is not None:
        grad_NK = grads[3].where((selected_NK >= 0) & valid_N[:, None], 0)
        base_N = base_N - grad_NK.sum(1)
        is_target_NK = selected_NK == targets_N[:, None]
        target_N = target_N + grad_NK.where(is_target_NK, 0).sum(1)
        # The terms of an entry that is selected twice are summed: sorted, equal entries are neighbours.
        entries_NK, order_NK = selected_NK.sort(1)
        place_NK = torch.nn.functional.pad((entries_NK[:, 1:] != entries_NK[:, :-1]).long().cumsum(1), (1, 0))
        sums_NK = torch.zeros_like(grad_NK).scatter_add_(1, place_NK, grad_NK.gather(1, order_NK))
        # The logarithm of a probability of zero is infinite.
        log_p_NK = selected_lp_NK.gather(1, order_NK).clamp(min=-1e4)
        factor_NK = base_N[:, None] if slope_N is None else base_N[:, None] + slope_N[:, None] * log_p_NK
        gradient_NK = log_p_NK.exp() * factor_NK + sums_NK.gather(1, place_NK)
        gradient_NK = gradient_NK + grad_log_prob_N[:, None].where(entries_NK == targets_N[:, None], 0)
        if call.options.softcap is not None:
            gradient_NK = gradient_NK * (1 - ((log_p_NK + lse_N[:, None]) / call.options.softcap) ** 2)
        chosen = Chosen(entries_NK.where(valid_N[:, None], -1), gradient_NK)
    # Ranks round the entropy's log-sum-exp.
    nll_N = -log_prob_N if call.shard is None or slope_N is None or call.options.invariant else None
    gradient = LogitsGradient(lse_N, base_N, slope_N, None, target_N, nll_N)
    return KnownRows(lse_N, -log_prob_N, None, gradient, chosen)
