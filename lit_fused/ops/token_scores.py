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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_fused.errors import check_switches
from lit_fused.ops.first_derivatives import refuse_vmap, without_second_derivatives
from lit_fused.ops.kernel_path import Chosen, HeadCall, Inputs, KernelPath, KnownRows, LogitsGradient
from lit_fused.ops.label_checks import IGNORE_INDEX
from lit_fused.ops.operands import Operands, PreparedRows
from lit_fused.ops.operators import (
    TENSORS,
    backward_operator,
    empty,
    in_schema,
    of_operands,
    of_schema,
    one_graph_break,
    operator,
)
from lit_fused.ops.options import LossOptions
from lit_fused.ops.vocabulary_parallel import VocabularyShard


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
    options: dict[str, Any] = {
        "scale": scale,
        "softcap": softcap,
        "reduction": "none",
        "statistics": entropy,
        "drop_ignored": drop_ignored,
        "float32_accumulation": float32_accumulation,
        "logits_budget_mib": logits_budget_mib,
        "chunk_size": chunk_size,
    }
    tensors = hidden_states, weight, bias, targets, selected, None
    if torch.compiler.is_compiling() and shard is None:
        found = _operator(*in_schema(tensors, ignore_index, options))
    else:
        check_switches({"entropy": bool}, {"entropy": entropy})
        found = _of_operands(Operands.here(tensors, LossOptions(**options), ignore_index), shard)
    log_prob, lse, entropies, chosen, top1 = found
    return TokenScores(log_prob, lse, entropies if entropy else None, None if selected is None else chosen, top1)


@one_graph_break
def _of_operands(operands: Operands, shard: VocabularyShard | None) -> list[Tensor]:
    rows = operands.checked_rows(shard, top1=True)
    return _placed(_TokenScores.apply(*rows.tensors, rows.selected_NK, rows.call, rows.path), rows)


def _placed(scores: tuple[Tensor, ...], rows: PreparedRows) -> list[Tensor]:
    """Return scores of rows in the shape of the targets."""
    *numbers, top1 = scores
    return [*(rows.placed(number) for number in numbers), rows.placed(top1, otherwise=-1)]


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        selected_NK: Tensor | None,
        call: HeadCall,
        path: KernelPath,
    ) -> tuple[Tensor, ...]:
        with torch.autocast(hidden_ND.device.type, enabled=False):
            inputs = Inputs(hidden_ND.to(call.compute_dtype), weight_VD.to(call.compute_dtype), bias_V, targets_N)
            rows = path.forward(inputs, None, call).rows
            selected = rows.lse.new_zeros(len(targets_N), 0)
            if selected_NK is not None:
                logits_NK = path.logits_of(selected_NK, inputs, call)
                exists_NK = (selected_NK >= 0) & (targets_N >= 0)[:, None]
                selected = (logits_NK - rows.lse[:, None]).where(exists_NK, 0)
                selected = selected.where(selected_NK != targets_N[:, None], -rows.nll[:, None])
        assert rows.top1 is not None
        return -rows.nll, rows.lse, rows.entropy, selected, rows.top1

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.call, ctx.path = inputs
        *numbers, top1 = output
        ctx.mark_non_differentiable(top1)
        ctx.save_for_backward(*tensors, *numbers)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_vmap(*grads)
        saved = ctx.saved_tensors  # A checkpoint gives them once.
        found = without_second_derivatives(
            lambda: _gradients(saved[:5], saved[5:], grads[:4], ctx.call, ctx.path), *saved[:3], *grads
        )
        return *found, None, None, None, None


def _gradients(
    tensors: tuple[Any, ...],
    scores: Sequence[Any],
    grads: Sequence[Tensor | None],
    call: HeadCall,
    path: KernelPath,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of hidden states, weight and bias from those of the four scores that have one."""
    hidden_ND, weight_VD, bias_V, targets_N, selected_NK = tensors
    known = _known(targets_N, selected_NK, scores, grads, call)
    inputs = Inputs(hidden_ND.to(call.compute_dtype), weight_VD.to(call.compute_dtype), bias_V, targets_N)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        found = path.backward(inputs, known, (), call).each()
    pairs = zip(found, (hidden_ND, weight_VD, bias_V), strict=True)
    return tuple(None if gradient is None else gradient.to(to.dtype) for gradient, to in pairs)


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
    nll_N = -log_prob_N if call.shard is None or slope_N is None else None  # ranks round the entropy's lse
    gradient = LogitsGradient(lse_N, base_N, slope_N, None, target_N, nll_N)
    return KnownRows(lse_N, -log_prob_N, None, gradient, chosen)


def _forward(operands: Operands) -> list[Tensor]:
    rows = operands.checked_rows(top1=True)
    return _placed(_TokenScores.forward(*rows.tensors, rows.selected_NK, rows.call, rows.path), rows)


def _forward_shapes(operands: Operands) -> list[Tensor]:
    shape, selected = operands.targets.shape, operands.selected
    chosen = empty(operands, (*shape, 0 if selected is None else selected.shape[-1]))
    return [*(empty(operands, shape) for _ in range(3)), chosen, empty(operands, shape, torch.int64)]


def _backward(rows: PreparedRows, *numbers: Tensor | None) -> tuple[Tensor | None, ...]:
    grads, scores = numbers[:4], [rows.of(number) for number in numbers[4:] if number is not None]
    grads = [None if grad is None else rows.of(grad) for grad in grads]
    return _gradients((*rows.tensors, rows.selected_NK), scores, grads, rows.call, rows.path)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs[:TENSORS], *output[:4])
    ctx.others, ctx.wanted = inputs[TENSORS:], of_schema(*inputs).wanted
    ctx.set_materialize_grads(False)


def _operator_gradients(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    tensors, scores = saved[:TENSORS], saved[TENSORS:]
    return of_operands(_operator_backward(*grads[:4], *scores, *tensors, *ctx.others), tensors, ctx.wanted)


_operator = operator("token_scores", 0, _forward, _forward_shapes)
_operator_backward = backward_operator("token_scores", 8, _backward)
_operator.register_autograd(_operator_gradients, setup_context=_save_for_backward)
