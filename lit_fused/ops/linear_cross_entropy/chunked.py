"""Exact linear cross-entropy, one chunk of tokens at a time: our own head, and the project's default.

``loss(hidden, weight, targets)`` needs the logits of a token only while it works on that token. So the logits of a
chunk are computed into one buffer, the row work (``rows_torch``) turns them into losses and then, in the same memory,
into their own gradient, and two more matrix products carry that gradient to the hidden states and to the weight. The
trick is that all of this happens in *forward*, where the logits are: backward only scales by the incoming scalar. That
is 6NDV operations, the minimum of an exact head, and the memory of one chunk plus the gradients themselves.

The trade: forward holds the gradients until backward runs. ``recompute=True`` keeps only one number per token instead
and computes the logits again in backward (8NDV), for when many micro-batches are in flight. ``reduction="none"`` always
does so, because each token's incoming gradient is known only then.

N tokens (valid ones: ignored tokens are dropped before anything is computed), C chunk, D hidden, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_fused.errors import UserError
from lit_fused.ops.linear_cross_entropy import rows_torch
from lit_fused.ops.linear_cross_entropy.checks import IGNORE_INDEX, check_budget, check_inputs, check_weights
from lit_fused.ops.linear_cross_entropy.rows_torch import RowOptions, RowResults

# Every chunk reads and writes the whole gradient of the weight once (8 bytes per entry in float32) beside 6 C
# operations per entry. At 256 rows that is about 190 operations per byte, where an H200 (790 TFLOP/s, 4.3 TB/s) breaks
# even.
MIN_CHUNK_ROWS = 256

# A CPU is as fast with small chunks as with large ones.
_DEFAULT_BUDGET_MIB = {"cpu": 32.0}
_DEFAULT_GPU_BUDGET_MIB = 256.0


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
    logits_budget_mib: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross entropy of ``logits = softcap(scale * hidden_states @ weight.T + bias)``, without ever building the logits.

    Per token with target y: ``(1 - label_smoothing) * (lse - logits[y]) + label_smoothing * (lse - mean(logits))
    + z_loss * lse**2``, with ``lse = logsumexp(logits)``: :func:`torch.nn.functional.cross_entropy` plus the z-loss of
    PaLM (arXiv:2204.02311, section 5). ``softcap(x) = c * tanh(x / c)`` is that of Gemma 2 (arXiv:2408.00118).

    Matrix products run in the autocast dtype if autocast is on, else in the inputs' own; the log-sum-exp, the loss and
    the accumulation of the weight's gradient in float32 (float64 for float64 inputs).

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
        ignore_index: targets with this value cost nothing and count nothing.
        reduction: "mean" over valid targets (zero when there are none), "sum", or "none" (shape of ``targets``).
        statistics: also sum up the statistics "correct" and "entropy" (two more passes over each chunk's logits).
        recompute: keep one number per token for backward instead of the gradients, and compute the logits twice.
        logits_budget_mib: size of the chunk buffer in MiB, which sets the number of rows C of a chunk: at least 256,
            and else at most half of the tokens. None is 32 on a CPU, 256 elsewhere.

    Returns:
        The loss, float32 (float64 for float64 inputs), and detached sums over the valid targets, each of shape ():
        "nll" (the plain negative log-likelihood, nats), "lse_squared", and with ``statistics`` also "correct" (int64:
        the largest logit is the target's) and "entropy" (nats).

    Raises:
        UserError: shapes, dtypes, devices or options that do not fit, or targets outside [0, V).
    """
    check_inputs(hidden_states, weight, targets, bias, ignore_index)
    check_weights(label_smoothing, z_loss)
    check_budget(logits_budget_mib)
    if softcap is not None and softcap <= 0:
        raise UserError(f"softcap must be positive or None, got {softcap}")
    if reduction not in ("mean", "sum", "none"):
        raise UserError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")

    device_type = hidden_states.device.type
    autocast = torch.is_autocast_enabled(device_type)
    compute_dtype = torch.get_autocast_dtype(device_type) if autocast else hidden_states.dtype

    targets_all = targets.reshape(-1)
    valid = (targets_all != ignore_index).nonzero()[:, 0]  # on a GPU this waits for the device, once
    hidden_ND = hidden_states.reshape(-1, hidden_states.shape[-1])
    if len(valid) < len(targets_all):
        hidden_ND = hidden_ND.index_select(0, valid)
    targets_N = targets_all[valid].long()

    default_budget = _DEFAULT_BUDGET_MIB.get(device_type, _DEFAULT_GPU_BUDGET_MIB)
    budget = default_budget if logits_budget_mib is None else logits_budget_mib
    tensors = (hidden_ND, weight, bias)
    wanted = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors)
    plan = _Plan(
        rows=RowOptions(scale, softcap, label_smoothing, z_loss, statistics),
        compute_dtype=compute_dtype,
        accumulate_dtype=torch.promote_types(compute_dtype, torch.float32),
        chunk_rows=chunk_rows(len(targets_N), weight.shape[0], compute_dtype, budget),
        per_token=reduction == "none",
        gradients_in_forward=any(wanted) and not recompute and reduction != "none",
        wanted=wanted,
    )
    loss, nll, lse_squared, correct, entropy = _ChunkedLinearCrossEntropy.apply(*tensors, targets_N, plan)
    stats = {"nll": nll, "lse_squared": lse_squared}
    if statistics:
        stats |= {"correct": correct, "entropy": entropy}

    if reduction == "none":
        loss = loss.new_zeros(targets_all.shape).index_copy(0, valid, loss).view(targets.shape)
    elif reduction == "mean":
        loss = loss / max(len(valid), 1)
    return loss, stats


def chunk_rows(tokens: int, vocabulary: int, dtype: torch.dtype, budget_mib: float) -> int:
    """Rows of a chunk: those whose logits fill the budget, at most half of the tokens, and never fewer than 256, where
    rewriting the weight's gradient rivals the work."""
    within_budget = int(budget_mib * 2**20) // (vocabulary * dtype.itemsize)
    return max(MIN_CHUNK_ROWS, min(within_budget, -(-tokens // 2)))


@dataclass(frozen=True)
class _Plan:
    """How one call runs: everything that is not a tensor."""

    rows: RowOptions
    compute_dtype: torch.dtype
    accumulate_dtype: torch.dtype
    chunk_rows: int
    per_token: bool
    gradients_in_forward: bool
    wanted: tuple[bool, ...]  # which of hidden, weight, bias need a gradient


class _Gradients:
    """Receives each chunk's gradient of the logits and carries it to the hidden states, the weight and the bias."""

    def __init__(self, hidden_ND: Tensor, weight_VD: Tensor, plan: _Plan) -> None:
        self.plan = plan
        wants_hidden, wants_weight, wants_bias = plan.wanted
        self.hidden_ND = torch.empty_like(hidden_ND) if wants_hidden else None
        self.weight_sum_VD = (  # the one large thing that forward holds: V x D, in float32 also for half weights
            torch.zeros_like(weight_VD, dtype=plan.accumulate_dtype) if wants_weight else None
        )
        self.bias_sum_V = weight_VD.new_zeros(len(weight_VD), dtype=plan.accumulate_dtype) if wants_bias else None

    def add(self, chunk: slice, hidden_CD: Tensor, weight_VD: Tensor, dlogits_CV: Tensor) -> None:
        if self.hidden_ND is not None:
            torch.mm(dlogits_CV, weight_VD, out=self.hidden_ND[chunk])
        if self.weight_sum_VD is not None:
            if dlogits_CV.dtype == self.weight_sum_VD.dtype:
                self.weight_sum_VD.addmm_(dlogits_CV.T, hidden_CD)
            elif dlogits_CV.is_cuda:
                torch.addmm(
                    self.weight_sum_VD, dlogits_CV.T, hidden_CD, out_dtype=torch.float32, out=self.weight_sum_VD
                )
            else:  # CPU products cannot accumulate into another dtype: each chunk's product is rounded once
                self.weight_sum_VD.add_(torch.mm(dlogits_CV.T, hidden_CD))
        if self.bias_sum_V is not None:
            self.bias_sum_V.add_(dlogits_CV.sum(0, dtype=self.bias_sum_V.dtype))

    def finish(self) -> None:
        """Apply the head's scale: so far the gradients are those of ``scale * products``, not of the products."""
        if self.plan.rows.scale != 1.0:
            for gradient in (self.hidden_ND, self.weight_sum_VD):
                if gradient is not None:
                    gradient.mul_(self.plan.rows.scale)


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, plan: _Plan
    ) -> tuple[Tensor, ...]:
        with torch.autocast(hidden_ND.device.type, enabled=False):
            hidden, weight = hidden_ND.to(plan.compute_dtype), weight_VD.to(plan.compute_dtype)
            gradients = _Gradients(hidden, weight, plan) if plan.gradients_in_forward else None
            results = RowResults.zeros(len(targets_N), plan.accumulate_dtype, hidden.device)
            for chunk, hidden_CD, logits_CV in _chunks_of_products(hidden, weight, plan):
                rows_torch.forward_rows(
                    logits_CV,
                    targets_N[chunk],
                    bias_V,
                    plan.rows,
                    results[chunk],
                    write_gradient=gradients is not None,
                )
                if gradients is not None:
                    gradients.add(chunk, hidden_CD, weight, logits_CV)

        ctx.plan = plan
        ctx.gradients = gradients
        if gradients is not None:
            gradients.finish()
            ctx.dtypes = hidden_ND.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype
            # bf16 gradients are rounded now, to hold half the bytes; fp16 ones could overflow before they are scaled
            if gradients.weight_sum_VD is not None and weight_VD.dtype == torch.bfloat16:
                gradients.weight_sum_VD = gradients.weight_sum_VD.to(weight_VD.dtype)
        else:
            ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, results.lse)
        statistics = results.nll.sum(), results.lse.square().sum(), results.correct.sum(), results.entropy.sum()
        ctx.mark_non_differentiable(*statistics)
        return (results.loss if plan.per_token else results.loss.sum()), *statistics

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        with torch.autocast(grad_loss.device.type, enabled=False):
            if ctx.plan.gradients_in_forward:
                return *_scale_gradients(ctx, grad_loss), None, None
            return *_recompute_gradients(ctx, grad_loss), None, None


def _chunks_of_products(hidden_ND: Tensor, weight_VD: Tensor, plan: _Plan) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield (slice, hidden (C, D), products (C, V)); the products' memory is the same for every chunk."""
    count = len(hidden_ND)
    rows = min(plan.chunk_rows, count)
    buffer_CV = hidden_ND.new_empty(rows, len(weight_VD))
    for start in range(0, count, max(rows, 1)):
        chunk = slice(start, min(start + rows, count))
        hidden_CD = hidden_ND[chunk]
        products_CV = torch.mm(hidden_CD, weight_VD.T, out=buffer_CV[: len(hidden_CD)])
        yield chunk, hidden_CD, products_CV


def _scale_gradients(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
    gradients, ctx.gradients = ctx.gradients, None
    if gradients is None:
        raise UserError(
            "backward ran a second time through a linear cross-entropy that computes its gradients in forward and has "
            "given them away; pass recompute=True to keep the graph"
        )
    results = (gradients.hidden_ND, gradients.weight_sum_VD, gradients.bias_sum_V)
    return tuple(  # in place: the gradients are the largest tensors here, and nobody else holds them
        None if gradient is None else gradient.mul_(grad_loss).to(dtype)
        for gradient, dtype in zip(results, ctx.dtypes, strict=True)
    )


def _recompute_gradients(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
    """A factor per token must act before tokens are summed; one factor for all acts last, where it cannot underflow."""
    hidden_ND, weight_VD, bias_V, targets_N, lse_N = ctx.saved_tensors
    plan = ctx.plan
    hidden, weight = hidden_ND.to(plan.compute_dtype), weight_VD.to(plan.compute_dtype)
    gradients = _Gradients(hidden, weight, plan)
    for chunk, hidden_CD, logits_CV in _chunks_of_products(hidden, weight, plan):
        factor_C = grad_loss[chunk] if plan.per_token else None
        rows_torch.backward_rows(logits_CV, targets_N[chunk], bias_V, lse_N[chunk], factor_C, plan.rows)
        gradients.add(chunk, hidden_CD, weight, logits_CV)
    gradients.finish()
    results = (gradients.hidden_ND, gradients.weight_sum_VD, gradients.bias_sum_V)
    inputs = (hidden_ND, weight_VD, bias_V)
    return tuple(
        None if gradient is None else (gradient if plan.per_token else gradient.mul_(grad_loss)).to(tensor.dtype)
        for gradient, tensor in zip(results, inputs, strict=True)
    )
