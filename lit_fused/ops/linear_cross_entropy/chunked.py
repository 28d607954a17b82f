"""Exact linear cross-entropy, one chunk of tokens at a time: our own head, and the project's default.

``loss(hidden, weight, targets)`` needs the logits of a token only while it works on that token. So the logits of a
chunk are computed into one buffer, turned into losses and into their own gradient, and two more matrix products carry
that gradient to the hidden states and to the weight. The trick is that all of this happens in *forward*, where the
logits are: backward only scales by the incoming scalar. That is 6NDV operations, the minimum of an exact head, and the
memory of one chunk plus the gradients themselves.

The trade: forward holds the gradients until backward runs. ``recompute=True`` keeps two numbers per token instead and
computes the logits again in backward (8NDV), for when many micro-batches are in flight. ``reduction="none"`` always
does so, because each token's incoming gradient is known only then. So does ``filter_eps``, which computes only some of
them again (``filtered``).

Here is what callers and autograd see. The work on a chunk is done in one of two ways, chosen once per call:
``one_step`` (the softmax inside the product; bfloat16 on Hopper GPUs) or ``two_step`` (products, then rows; all else).

N tokens, C chunk, D hidden, V vocabulary.
"""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from lit_fused.errors import UserError
from lit_fused.ops.linear_cross_entropy import two_step
from lit_fused.ops.linear_cross_entropy.checks import (
    IGNORE_INDEX,
    check_budget,
    check_filter,
    check_inputs,
    check_shard,
    check_weights,
)
from lit_fused.ops.linear_cross_entropy.filtered import Filter
from lit_fused.ops.linear_cross_entropy.plan import Gradients, Plan, RowOptions, VocabularyShard, Wanted

try:
    from lit_fused.ops.linear_cross_entropy import one_step
except ImportError:  # Triton exists for Linux only
    one_step = None

F = TypeVar("F", bound=Callable[..., Any])

# A CPU is as fast with small chunks as with large ones.
_DEFAULT_BUDGET_MIB = {"cpu": 32.0}
_DEFAULT_GPU_BUDGET_MIB = 448.0  # docs/performance.md: more memory buys little time


def _one_graph_break(function: F) -> F:
    """``torch.compile`` of a caller leaves its graph here, once: the kernels are compiled as they are."""
    return torch.compiler.disable(function)  # type: ignore[return-value]


@_one_graph_break
def linear_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean",
    statistics: bool = True,
    recompute: bool = False,
    drop_ignored: bool = False,
    float32_accumulation: bool | None = None,
    logits_budget_mib: float | None = None,
    filter_eps: float | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross entropy of ``logits = softcap(scale * hidden_states @ weight.T + bias)``, without ever building the logits.

    Per token with target y: ``(1 - label_smoothing) * (lse - logits[y]) + label_smoothing * (lse - mean(logits))
    + z_loss * lse**2``, with ``lse = logsumexp(logits)``: :func:`torch.nn.functional.cross_entropy` plus the z-loss of
    PaLM (arXiv:2204.02311, section 5). ``softcap(x) = c * tanh(x / c)`` is that of Gemma 2 (arXiv:2408.00118).

    Matrix products run in the autocast dtype if autocast is on, else in the inputs' own; the log-sum-exp and the loss
    are float32 (float64 for float64 inputs). Nothing waits for a GPU, unless an option below says so. Under
    ``torch.compile`` the call is one graph break.

    Args:
        hidden_states: (..., D) floating point, the output layer's input.
        weight: (V, D), same dtype and device as ``hidden_states`` (under autocast: any floating dtype).
        targets: (...) integer class indices in [0, V), or ``ignore_index``. Already shifted: one target per hidden
            state.
        bias: (V,) added to the scaled products.
        scale: factor on the products.
        softcap: c > 0, or None for no cap.
        label_smoothing: in [0, 1].
        z_loss: weight of the squared log-sum-exp, >= 0.
        ignore_index: targets with this value count nothing; what they cost, ``drop_ignored`` says.
        reduction: "mean" over valid targets (zero when there are none), "sum", or "none" (shape of ``targets``).
        statistics: also sum up the statistics "correct" and "entropy".
        recompute: keep two numbers per token for backward instead of the gradients, and compute the logits twice.
        drop_ignored: on a GPU, take ignored tokens out before the products, which costs one wait for the device; worth
            it where many are ignored. On a CPU they are always taken out.
        float32_accumulation: sum the gradient of a bfloat16 weight in float32, which needs V x D x 4 bytes instead of
            V x D x 2. None does so where it matters for its precision: for more than 24 chunks, and wherever the logits
            themselves are rounded to half precision.
        logits_budget_mib: size of a chunk in MiB, which sets its number of rows C: at least 256, and else at most half
            of the tokens. None is 32 on a CPU, 448 elsewhere.
        filter_eps: None is exact. Else backward computes only columns of the vocabulary in which, among 2048 rows, some
            probability exceeds it, and corrects for the rest; forward is exact, and so are groups of rows whose mean
            dropped mass would exceed 5 %. 2**-12 is a usual value, 0 drops nothing. Forward then holds no gradient
            (``recompute``); see docs/filtered.md. Except for bfloat16 on Hopper GPUs, backward waits for the device
            once.
        shard: which entries of a vocabulary that is divided over ranks ``weight`` and ``bias`` are; targets are
            entries of the whole. The ranks exchange a few numbers per token, and sum the gradient of the hidden states;
            that of the weight is each rank's own. Loss and statistics are the same on every rank.

    Returns:
        The loss, float32 (float64 for float64 inputs), and detached sums over the valid targets, each of shape ():
        "nll" (the plain negative log-likelihood, nats), "lse_squared", and with ``statistics`` also "correct" (int64:
        the largest logit is the target's; of equal ones the kernels of a GPU and a divided vocabulary count none, a CPU
        the first) and
        "entropy" (nats). With ``filter_eps`` and where a gradient is wanted also "dropped_mass" (of each token, in
        [0, 1]), "kept_columns" (the share of columns that each token's group keeps) and "exact_tokens" (how many are in
        groups that are exact), all of the result's dtype.

    Raises:
        UserError: shapes, dtypes, devices or options that do not fit, or targets outside [0, V).
    """
    if shard is not None:
        check_shard(weight, shard)
    vocabulary = weight.shape[0] if shard is None else shard.vocabulary
    check_inputs(hidden_states, weight, targets, bias, ignore_index, vocabulary)
    check_weights(label_smoothing, z_loss)
    check_budget(logits_budget_mib)
    check_filter(filter_eps, label_smoothing)
    if scale == 0 or not math.isfinite(scale):
        raise UserError(f"scale must be a number other than zero, got {scale}")
    if softcap is not None and softcap <= 0:
        raise UserError(f"softcap must be positive or None, got {softcap}")
    if reduction not in ("mean", "sum", "none"):
        raise UserError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")

    device_type = hidden_states.device.type
    autocast = torch.is_autocast_enabled(device_type)
    compute_dtype = torch.get_autocast_dtype(device_type) if autocast else hidden_states.dtype
    wanted = Wanted(
        *(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden_states, weight, bias))
    )
    default_budget = _DEFAULT_BUDGET_MIB.get(device_type, _DEFAULT_GPU_BUDGET_MIB)
    plan = Plan(
        rows=RowOptions(scale, softcap, label_smoothing, z_loss, statistics, vocabulary),
        compute_dtype=compute_dtype,
        weight_dtype=weight.dtype,
        budget_mib=default_budget if logits_budget_mib is None else logits_budget_mib,
        float32_accumulation=float32_accumulation,
        per_token=reduction == "none",
        gradients_in_forward=any(wanted) and not recompute and reduction != "none" and filter_eps is None,
        wanted=wanted,
        shard=shard,
        filter_eps=filter_eps if any(wanted) else None,
    )

    hidden_ND = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
    bias = None if bias is None else bias.contiguous()
    targets_all = targets.reshape(-1).long()
    valid_all = targets_all != ignore_index
    targets_N = targets_all.where(valid_all, -1)
    way = one_step if one_step is not None and one_step.supports(hidden_ND, weight, plan) else two_step
    kept = None
    if drop_ignored or not way.handles_ignored(hidden_ND):
        kept = valid_all.nonzero()[:, 0]
        if len(kept) < len(targets_N):
            hidden_ND = hidden_ND.index_select(0, kept)
        targets_N = targets_N[kept]
        way = way if len(kept) else two_step

    inverse_count = 1 / valid_all.sum().clamp(min=1).to(plan.result_dtype) if reduction == "mean" else None
    loss, nll, lse_squared, correct, entropy, *of_filter = _ChunkedLinearCrossEntropy.apply(
        hidden_ND, weight, bias, targets_N, inverse_count, plan, way
    )
    if reduction == "none":
        if kept is not None:
            loss = loss.new_zeros(targets_all.shape).index_copy(0, kept, loss)
        loss = loss.view(targets.shape)
    stats = {"nll": nll, "lse_squared": lse_squared}
    if statistics:
        stats |= {"correct": correct, "entropy": entropy}
    if of_filter:
        stats |= zip(("dropped_mass", "kept_columns", "exact_tokens"), of_filter, strict=True)
    return loss, stats


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        inverse_count: Tensor | None,
        plan: Plan,
        way: ModuleType,
    ) -> tuple[Tensor, ...]:
        with torch.autocast(hidden_ND.device.type, enabled=False):
            hidden, weight = hidden_ND.to(plan.compute_dtype), weight_VD.to(plan.compute_dtype)
            results, held = way.forward(hidden, weight, bias_V, targets_N, inverse_count, plan)

        gradients = held if isinstance(held, Gradients) else None
        ctx.plan, ctx.way, ctx.gradients = plan, way, gradients
        statistics = results.nll.sum(), results.lse.square().sum(), results.correct.sum(), results.entropy.sum()
        if gradients is not None:
            ctx.dtypes = hidden_ND.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype
            ctx.factor = None if way.applies_factor(plan) else inverse_count
            # bf16 gradients are rounded now, to hold half the bytes; fp16 ones could overflow before they are scaled
            if gradients.weight_VD is not None and weight_VD.dtype == torch.bfloat16:
                gradients.weight_VD = gradients.weight_VD.to(weight_VD.dtype)
            if gradients.hidden_ND is not None and hidden_ND.dtype == torch.bfloat16:
                gradients.hidden_ND = gradients.hidden_ND.to(hidden_ND.dtype)
        else:
            ctx.factor = inverse_count
            filter_: tuple[Tensor, ...] = ()
            if isinstance(held, Filter):
                statistics += held.statistics.clone().unbind()  # the caller's, who may change them
                filter_ = held
            ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, results.lse, results.nll, *filter_)
        ctx.mark_non_differentiable(*statistics)
        if plan.per_token:
            return results.loss, *statistics
        loss = results.loss.sum()
        return (loss if inverse_count is None else loss * inverse_count), *statistics

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        with torch.autocast(grad_loss.device.type, enabled=False):
            factor = grad_loss if ctx.factor is None else grad_loss * ctx.factor
            gradients = _given_away(ctx, factor) if ctx.plan.gradients_in_forward else _recomputed(ctx, factor)
        return *gradients, None, None, None, None


def _given_away(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
    gradients: Gradients | None
    gradients, ctx.gradients = ctx.gradients, None
    if gradients is None:
        raise UserError(
            "backward ran a second time through a linear cross-entropy that computes its gradients in forward and has "
            "given them away; pass recompute=True to keep the graph"
        )
    found = (gradients.hidden_ND, gradients.weight_VD, gradients.bias_V)
    return tuple(  # in place: the gradients are the largest tensors here, and nobody else holds them
        None if gradient is None else ctx.way.scale_(gradient, factor).to(dtype)
        for gradient, dtype in zip(found, ctx.dtypes, strict=True)
    )


def _recomputed(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
    """A factor per token must act before tokens are summed. One for all tokens acts there as well where rows have
    factors anyway, and else last, where it cannot underflow."""
    hidden_ND, weight_VD, bias_V, targets_N, lse_N, nll_N, *filter_ = ctx.saved_tensors
    plan: Plan = ctx.plan
    hidden, weight = hidden_ND.to(plan.compute_dtype), weight_VD.to(plan.compute_dtype)
    acts_first = plan.per_token or ctx.way.ROWS_HAVE_FACTORS
    factor_N = factor.expand(len(targets_N)).contiguous() if acts_first else None
    inputs_of_rows = hidden, weight, bias_V, targets_N, lse_N, nll_N, factor_N
    gradients: Gradients
    if plan.filter_eps is None:
        gradients = ctx.way.backward(*inputs_of_rows, plan)
    else:
        gradients = ctx.way.filtered_backward(*inputs_of_rows, Filter(*filter_), plan)
    found = (gradients.hidden_ND, gradients.weight_VD, gradients.bias_V)
    inputs = (hidden_ND, weight_VD, bias_V)
    return tuple(
        None if gradient is None else (gradient if acts_first else ctx.way.scale_(gradient, factor)).to(tensor.dtype)
        for gradient, tensor in zip(found, inputs, strict=True)
    )
