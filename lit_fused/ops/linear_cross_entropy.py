"""Exact linear cross-entropy, one chunk of tokens at a time: our own head, and the project's default.

``loss(hidden, weight, targets)`` needs the logits of a token only while it works on that token. So the logits of a
chunk are computed into one buffer, turned into losses and into their own gradient, and two more matrix products carry
that gradient to the hidden states and to the weight. All of this happens in *forward*, where the logits are; backward
only scales by the incoming scalar. That is 6NDV operations, the minimum of an exact head, and the memory of one chunk
plus the gradients themselves.

The trade-off: forward holds the gradients until backward runs. ``recompute=True`` keeps two numbers per token instead
and computes the logits again in backward (8NDV). ``reduction="none"`` always does, because each token's incoming
gradient is known only in backward; ``filter_eps`` recomputes only some of the logits (``filtered``).

N tokens, C chunk, D hidden, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lit_fused.errors import UserError
from lit_fused.ops.filtered.filtered_hopper import FilteredHopper
from lit_fused.ops.filtered.filtered_logits import FilteredLogits
from lit_fused.ops.first_derivatives import refuse_second_derivatives, without_second_derivatives
from lit_fused.ops.hopper import hopper_path
from lit_fused.ops.kernel_path import Gradients, HeadCall, Inputs, KernelPath, KnownRows, Wanted
from lit_fused.ops.label_checks import IGNORE_INDEX, check_inputs
from lit_fused.ops.logits import logits_path
from lit_fused.ops.options import LossOptions
from lit_fused.ops.products import NoKernels
from lit_fused.ops.reference import linear_cross_entropy_reference
from lit_fused.ops.vocabulary_parallel import VocabularyShard

__all__ = ["linear_cross_entropy", "linear_cross_entropy_reference"]

_CPU_BUDGET_MIB = 32.0  # A CPU is as fast with small chunks as with large ones.
_GPU_BUDGET_MIB = 448.0  # docs/performance.md: more memory buys little time

_Function = TypeVar("_Function", bound=Callable[..., Any])


def one_graph_break(function: _Function) -> _Function:
    """Keep ``torch.compile`` out of a function, whose kernels it takes as they are."""
    disabled: Any = torch.compiler.disable(function)
    return disabled


@one_graph_break
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
    chunk_size: int | None = None,
    filter_eps: float | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the cross entropy of ``logits = softcap(scale * hidden_states @ weight.T + bias)``, and its statistics.

    Per token with target y: ``(1 - label_smoothing) * (lse - logits[y]) + label_smoothing * (lse - mean(logits))
    + z_loss * lse**2``, with ``lse = logsumexp(logits)``: :func:`torch.nn.functional.cross_entropy` plus the z-loss of
    PaLM (arXiv:2204.02311, section 5). ``softcap(x) = c * tanh(x / c)`` is that of Gemma 2 (arXiv:2408.00118).

    Matrix products run in the autocast dtype if autocast is on, else in the inputs' own; the log-sum-exp and the loss
    are float32 (float64 for float64 inputs). The host does not wait for a GPU, unless an option below says so. Under
    ``torch.compile`` the call is one graph break.

    Args:
        hidden_states: (..., D) floating point, the output layer's input.
        weight: (V, D), same dtype and device as ``hidden_states`` (under autocast: any floating dtype).
        targets: (...) integer class indices in [0, V), or ``ignore_index``, one per hidden state: already shifted.
        bias: (V,) added to the scaled products.
        scale: factor on the products.
        softcap: c > 0, or None for no cap.
        label_smoothing: in [0, 1].
        z_loss: weight of the squared log-sum-exp, >= 0.
        ignore_index: tokens with this target count nothing; ``drop_ignored`` says what they cost.
        reduction: "mean" over valid targets (zero when there are none), "sum", or "none" (shape of ``targets``).
        statistics: also sum up the statistics "correct" and "entropy".
        recompute: keep two numbers per token for backward instead of the gradients, and compute the logits twice.
        drop_ignored: on a GPU, take ignored tokens out before the products: for one wait for the device, which pays
            where many are ignored. On a CPU they are always taken out.
        float32_accumulation: sum the gradient of a bfloat16 weight in float32, which needs V x D x 4 bytes instead of
            V x D x 2. None does so for more than 24 chunks, and where the logits are rounded to half precision.
        logits_budget_mib: size of a chunk in MiB, which sets its number of rows C: at least 256, and else at most half
            of the tokens. None is 32 on a CPU, 448 elsewhere.
        chunk_size: the rows C themselves, instead of a budget; rounded up to a multiple of 128.
        filter_eps: None is exact. Otherwise backward computes only columns of the vocabulary in which, among 2048 rows,
            some probability exceeds it, and corrects for the rest; forward is exact. So are rows in which more than
            half of 1 - p(target) is in smaller probabilities, each alone, and groups that would drop more than a tenth
            of that. 2**-12 is a usual value, 0 drops nothing. It implies ``recompute``.
            Except for bfloat16 on Hopper GPUs, backward waits for the device once. See docs/filtered.md.
        shard: the entries of a vocabulary divided over ranks that ``weight`` and ``bias`` have; targets are entries
            of the whole. The ranks exchange a few numbers per token, and sum the gradient of the hidden states; that of
            the weight is each rank's own. Loss and statistics are the same on every rank.

    Returns:
        The loss, float32 (float64 for float64 inputs), and detached sums over the valid targets, each of shape ():
        "nll" (the plain negative log-likelihood, nats), "lse_squared", and with ``statistics`` also "correct" (int64:
        the largest logit is the target's; of equal ones the kernels of a GPU and a divided vocabulary count none, a CPU
        the first) and "entropy" (nats). With ``filter_eps`` and where a gradient is wanted also "dropped_mass" (per
        token, the share of 1 - p(target) that its group drops), "kept_columns" (the share of columns that are computed
        for each token) and "exact_tokens" (how many are exact, alone or in their group), all of the result's dtype.

    Raises:
        UserError: shapes, dtypes, devices or options that do not fit, or targets outside [0, V). In backward:
            ``create_graph=True``, as there are no second derivatives.
    """
    if shard is not None:
        shard.check(weight)
    check_inputs(hidden_states, weight, targets, bias, ignore_index, None if shard is None else shard.vocabulary)
    options = LossOptions(
        scale=scale,
        softcap=softcap,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction=reduction,
        statistics=statistics,
        recompute=recompute,
        drop_ignored=drop_ignored,
        float32_accumulation=float32_accumulation,
        logits_budget_mib=logits_budget_mib,
        chunk_size=chunk_size,
        filter_eps=filter_eps,
    )
    if ignore_index >= 0:
        targets = targets.masked_fill(targets == ignore_index, IGNORE_INDEX)
    return loss_of_checked(hidden_states, weight, targets, bias, shard, options)


@one_graph_break
def loss_of_checked(
    hidden_states: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    shard: VocabularyShard | None,
    options: LossOptions,
    planned_capability: tuple[int, int] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what :func:`linear_cross_entropy` returns, for inputs that have been checked.

    Targets are negative where ignored. With ``planned_capability`` the inputs are fake tensors: the call allocates what
    it would on a GPU of that compute capability, and computes nothing.
    """
    if options.filter_eps is None and torch._C._are_functorch_transforms_active():
        options = replace(options, recompute=True)  # torch.func differentiates what forward returns
    rows = PreparedRows(hidden_states, weight, targets, bias, shard, options, planned_capability)
    call = rows.call
    inverse_count = 1 / rows.valid_N.sum().clamp(min=1).to(call.result_dtype) if options.reduction == "mean" else None
    found = _LinearCrossEntropy.apply(rows.hidden_ND, weight, rows.bias, rows.targets_N, inverse_count, call, rows.path)
    loss, nll, lse_squared, correct, entropy, *own = found[: 5 + len(rows.path.own_statistics)]
    if call.per_token:
        loss = rows.placed(loss)
    stats = {"nll": nll, "lse_squared": lse_squared}
    if options.statistics:
        stats |= {"correct": correct, "entropy": entropy}
    return loss, stats | dict(zip(rows.path.own_statistics, own, strict=True))


class PreparedRows:
    """The inputs of a call as rows, and the path for them. What it ignores is left out where it would cost."""

    def __init__(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        shard: VocabularyShard | None,
        options: LossOptions,
        planned_capability: tuple[int, int] | None = None,
        *,
        top1: bool = False,
    ) -> None:
        device_type = hidden_states.device.type
        autocast = torch.is_autocast_enabled(device_type)
        operands = (hidden_states, weight, bias)
        on_cpu = device_type == "cpu" and planned_capability is None
        self.call = call = HeadCall(
            options,
            vocabulary=weight.shape[0] if shard is None else shard.vocabulary,
            compute_dtype=torch.get_autocast_dtype(device_type) if autocast else hidden_states.dtype,
            weight_dtype=weight.dtype,
            wanted=Wanted(*(torch.is_grad_enabled() and t is not None and t.requires_grad for t in operands)),
            budget_mib=options.logits_budget_mib or (_CPU_BUDGET_MIB if on_cpu else _GPU_BUDGET_MIB),
            shard=shard,
            top1=top1,
        )
        self.hidden_ND = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        self.bias = None if bias is None else bias.contiguous()
        self.shape = targets.shape
        self.targets_N = targets.reshape(-1).long().clamp(min=-1)  # the caller may change its own before backward
        self.valid_N = self.targets_N >= 0
        self.path = _kernel_path(self.hidden_ND, weight, call, planned_capability)
        self._kept = None
        if planned_capability is None and (options.drop_ignored or not self.path.kernels.handles_ignored):
            self._kept = self.valid_N.nonzero()[:, 0]
            self.hidden_ND, self.targets_N = self.taken(self.hidden_ND), self.taken(self.targets_N)
            self.path = _kernel_path(self.hidden_ND, weight, call)

    def taken(self, rows: Tensor) -> Tensor:
        """Return those of N rows that are not left out."""
        return rows if self._kept is None or len(self._kept) == len(rows) else rows.index_select(0, self._kept)

    def placed(self, rows: Tensor, otherwise: int = 0) -> Tensor:
        """Return results in the shape of the targets, and of what a row has; ``otherwise`` where one was left out."""
        if self._kept is not None:
            everywhere = rows.new_full((len(self.valid_N), *rows.shape[1:]), otherwise)
            rows = everywhere.index_copy(0, self._kept, rows)
        return rows.view((*self.shape, *rows.shape[1:]))


def _kernel_path(
    hidden_ND: Tensor, weight_VD: Tensor, call: HeadCall, planned_capability: tuple[int, int] | None = None
) -> KernelPath:
    """Return the path for these tensors: Hopper's where it can run, and a filter around it where one is asked for."""
    filtered = call.options.filter_eps is not None and any(call.wanted)
    if planned_capability is None:
        kernels = None
        on_hopper = hopper_path.supports(hidden_ND, weight_VD, call)
    else:
        kernels = NoKernels()
        on_hopper = planned_capability[0] == 9 and hopper_path.computes(hidden_ND, call)
    if on_hopper and len(hidden_ND):  # its kernels take at least one row
        return (FilteredHopper if filtered else hopper_path.HopperPath)(kernels)
    return (FilteredLogits if filtered else logits_path.LogitsPath)(kernels or logits_path.row_kernels(hidden_ND))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        inverse_count: Tensor | None,
        call: HeadCall,
        path: KernelPath,
    ) -> tuple[Any, ...]:
        """Return the loss, its statistics, and for backward the gradients or the tensors to compute them of."""
        with torch.autocast(hidden_ND.device.type, enabled=False):
            inputs = Inputs(hidden_ND.to(call.compute_dtype), weight_VD.to(call.compute_dtype), bias_V, targets_N)
            rows, gradients, saved, own_statistics = path.forward(inputs, inverse_count, call)
        statistics = rows.nll.sum(), rows.lse.square().sum(), rows.correct.sum(), rows.entropy.sum(), *own_statistics
        loss = rows.loss
        if not call.per_token:
            loss = loss.sum() if inverse_count is None else loss.sum() * inverse_count
        if gradients is None:
            return loss, *statistics, rows.lse, rows.nll, *saved
        # Bfloat16 gradients are rounded now, to hold half the bytes; float16 ones could overflow unscaled.
        if gradients.weight_VD is not None and weight_VD.dtype == torch.bfloat16:
            gradients.weight_VD = gradients.weight_VD.to(torch.bfloat16)
        if gradients.hidden_ND is not None and hidden_ND.dtype == torch.bfloat16:
            gradients.hidden_ND = gradients.hidden_ND.to(torch.bfloat16)
        return loss, *statistics, gradients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        *tensors, inverse_count, ctx.call, ctx.path = inputs
        ctx.gradients = output[-1] if isinstance(output[-1], Gradients) else None
        ctx.made_in_forward, ctx.factor = ctx.gradients is not None, inverse_count
        ctx.dtypes = tuple(None if tensor is None else tensor.dtype for tensor in tensors[:3])
        if not ctx.made_in_forward:
            ctx.save_for_backward(*tensors, *output[5 + len(ctx.path.own_statistics) :])
        elif ctx.call.factor_in_forward:
            ctx.factor = None
        ctx.mark_non_differentiable(*(number for number in output[1:] if isinstance(number, Tensor)))

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        factor = grad_loss if ctx.factor is None else grad_loss * ctx.factor
        if ctx.made_in_forward:
            refuse_second_derivatives()
            found = _given_away(ctx, factor)
        else:
            found = without_second_derivatives(lambda: _recomputed(ctx, factor), *ctx.saved_tensors[:3], grad_loss)
        return *found, None, None, None, None


def _given_away(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
    gradients, ctx.gradients = ctx.gradients, None
    if gradients is None:
        raise UserError(
            "backward ran a second time through a linear cross-entropy that computes its gradients in forward and has "
            "given them away; pass recompute=True to keep the graph"
        )
    return _scaled(gradients, factor, ctx)


def _recomputed(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients, from logits that are computed again.

    A factor per token must act before tokens are summed. One factor for all tokens acts there as well where rows have
    factors anyway, and last elsewhere, where it cannot underflow.
    """
    hidden_ND, weight_VD, bias_V, targets_N, lse_N, nll_N, *saved = ctx.saved_tensors
    call: HeadCall = ctx.call
    acts_first = call.per_token or ctx.path.rows_have_factors
    factor_N = factor.expand(len(targets_N)).contiguous() if acts_first else None
    with torch.autocast(hidden_ND.device.type, enabled=False):
        inputs = Inputs(hidden_ND.to(call.compute_dtype), weight_VD.to(call.compute_dtype), bias_V, targets_N)
        found = ctx.path.backward(inputs, KnownRows(lse_N, nll_N, factor_N), tuple(saved), call)
    return _scaled(found, None if acts_first else factor, ctx)


def _scaled(gradients: Gradients, factor: Tensor | None, ctx: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients times the factor in the dtypes of their inputs. They are scaled in place: they are the
    largest tensors here, and nothing else refers to them."""
    for gradient in gradients.each() if factor is not None else ():
        if gradient is not None:
            ctx.path.kernels.scale_(gradient, factor)
    return tuple(g if g is None else g.to(dtype) for g, dtype in zip(gradients.each(), ctx.dtypes, strict=True))
