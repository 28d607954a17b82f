"""Exact linear cross-entropy, one chunk of tokens at a time: our own head, and the project's default.

``loss(hidden, weight, targets)`` needs the logits of a token only while it works on that token. So the logits of a
chunk are computed into one buffer, turned into losses and into their own gradient, and two more matrix products carry
that gradient to the hidden states and to the weight. All of this happens in *forward*, where the logits are; backward
only scales by the incoming scalar. That is 6NDV operations, the minimum of an exact head, and the memory of one chunk
plus the gradients themselves.

The trade-off: forward holds the gradients until backward runs. ``recompute=True`` keeps two numbers per token instead
and computes the logits again in backward (8NDV). ``reduction="none"`` always does, because each token's incoming
gradient is known only in backward.

N tokens, C chunk, D hidden, V vocabulary.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_fused.errors import UserError
from lit_fused.ops.first_derivatives import refuse_second_derivatives, refuse_vmap, without_second_derivatives
from lit_fused.ops.kernel_path import Gradients, HeadCall, Inputs, KernelPath, KnownRows
from lit_fused.ops.label_checks import IGNORE_INDEX, check_token_weights
from lit_fused.ops.operands import Operands, PreparedRows
from lit_fused.ops.operators import (
    TENSORS,
    as_results,
    backward_operator,
    empty,
    empty_gradients,
    in_schema,
    of_operands,
    of_schema,
    one_graph_break,
    operator,
)
from lit_fused.ops.options import LossOptions
from lit_fused.ops.reference import linear_cross_entropy_reference
from lit_fused.ops.vocabulary_parallel import VocabularyShard

__all__ = ["linear_cross_entropy", "linear_cross_entropy_reference"]


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
    token_weights: Tensor | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the cross entropy of ``logits = softcap(scale * hidden_states @ weight.T + bias)``, and its statistics.

    Per token with target y: ``(1 - label_smoothing) * (lse - logits[y]) + label_smoothing * (lse - mean(logits))
    + z_loss * lse**2``, with ``lse = logsumexp(logits)``: :func:`torch.nn.functional.cross_entropy` plus the z-loss of
    PaLM (arXiv:2204.02311, section 5). ``softcap(x) = c * tanh(x / c)`` is that of Gemma 2 (arXiv:2408.00118).

    Matrix products run in the autocast dtype if autocast is on, else in the inputs' own, as those of float64 always do;
    the log-sum-exp and the loss are float32 (float64 for float64 inputs). The host does not wait for a GPU, unless an
    option below says so. ``torch.compile`` keeps the call whole, as an operator; with ``shard`` it is one graph break.

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
            of the tokens. None is 32 on a CPU, and on a GPU a hundredth of its memory, at least 448 (and no more
            with ``shard``).
        chunk_size: the rows C themselves, instead of a budget; rounded up to a multiple of 128.
        token_weights: (...) a factor on each token's loss, without a gradient of its own; the mean is divided by the
            sum of the valid tokens'. Classes have weights ``w`` (V,) by ``w[targets.clamp(min=0)]``.
        shard: the entries of a vocabulary divided over ranks that ``weight`` and ``bias`` have; targets are entries
            of the whole. The ranks exchange a few numbers per token, and sum the gradient of the hidden states; that of
            the weight is each rank's own. Loss and statistics are the same on every rank.

    Returns:
        The loss, float32 (float64 for float64 inputs), and detached sums over the valid targets, each of shape ():
        "nll" (the plain negative log-likelihood, nats), "lse_squared", and with ``statistics`` also "correct" (int64:
        the largest logit is the target's; of equal ones the kernels of a GPU and a divided vocabulary count none, a CPU
        the first) and "entropy" (nats).

    Raises:
        UserError: shapes, dtypes, devices or options that do not fit, or targets outside [0, V). In backward:
            ``create_graph=True``, as there are no second derivatives.
    """
    options: dict[str, Any] = {
        "scale": scale,
        "softcap": softcap,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "reduction": reduction,
        "statistics": statistics,
        "recompute": recompute,
        "drop_ignored": drop_ignored,
        "float32_accumulation": float32_accumulation,
        "logits_budget_mib": logits_budget_mib,
        "chunk_size": chunk_size,
    }
    tensors = hidden_states, weight, bias, targets, None, token_weights
    if torch.compiler.is_compiling() and shard is None:
        if token_weights is not None:
            check_token_weights(token_weights, hidden_states)  # In the operator nothing wants a gradient.
        loss, *sums = _operator(*in_schema(tensors, ignore_index, options))[:5]
        return loss, _statistics([number.detach() for number in sums], statistics)
    return _of_operands(Operands.here(tensors, LossOptions(**options), ignore_index), shard)


@one_graph_break
def _of_operands(operands: Operands, shard: VocabularyShard | None) -> tuple[Tensor, dict[str, Tensor]]:
    return loss_of_rows(operands.checked_rows(shard))


@one_graph_break
def loss_of_checked(
    hidden_states: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    shard: VocabularyShard | None,
    options: LossOptions,
    token_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what :func:`linear_cross_entropy` returns, for checked inputs, targets negative where ignored."""
    operands = Operands.here((hidden_states, weight, bias, targets, None, token_weights), options)
    return loss_of_rows(PreparedRows(operands, shard))


def loss_of_rows(rows: PreparedRows) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the statistics that a path computes for prepared rows."""
    found = _LinearCrossEntropy.apply(*rows.tensors, rows.weights_N, rows.inverse_count, rows.call, rows.path)
    loss, *sums = found[: 5 + len(rows.path.own_statistics)]
    stats = _statistics(sums, rows.call.options.statistics)
    own = dict(zip(rows.path.own_statistics, sums[4:], strict=True))
    return rows.placed(loss) if rows.call.per_token else loss, stats | own


def _statistics(sums: list[Tensor], all_of_them: bool) -> dict[str, Tensor]:
    names = ("nll", "lse_squared", "correct", "entropy")
    return dict(zip(names if all_of_them else names[:2], sums, strict=False))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        weights_N: Tensor | None,
        inverse_count: Tensor | None,
        call: HeadCall,
        path: KernelPath,
    ) -> tuple[Any, ...]:
        """Return the loss, its statistics, and for backward the gradients or the tensors to compute them of."""
        with torch.autocast(hidden_ND.device.type, enabled=False):
            inputs = Inputs(hidden_ND.to(call.compute_dtype), weight_VD.to(call.compute_dtype), bias_V, targets_N)
            factor_N = weights_N
            if inverse_count is not None and call.gradients_in_forward and call.factor_in_forward:
                factor_N = inverse_count.expand(len(targets_N)) if weights_N is None else inverse_count * weights_N
                factor_N = factor_N.contiguous()
            rows, gradients, saved, own_statistics = path.forward(inputs, factor_N, call)
        statistics = rows.nll.sum(), rows.lse.square().sum(), rows.correct.sum(), rows.entropy.sum(), *own_statistics
        loss = rows.loss if weights_N is None else rows.loss * weights_N
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
        ctx.set_materialize_grads(False)  # of all other outputs: zeros that nothing reads
        ctx.gradients = output[-1] if isinstance(output[-1], Gradients) else None
        ctx.made_in_forward, ctx.factor = ctx.gradients is not None, inverse_count
        ctx.dtypes = tuple(None if tensor is None else tensor.dtype for tensor in tensors[:3])
        if not ctx.made_in_forward:
            ctx.save_for_backward(*tensors, *output[5 + len(ctx.path.own_statistics) :])
        elif ctx.call.factor_in_forward:
            ctx.factor = None
        ctx.mark_non_differentiable(*(number for number in output[1:] if isinstance(number, Tensor)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_loss = grads[0]  # the statistics have none
        if grad_loss is None:  # nothing depends on the loss
            return (None,) * 8
        refuse_vmap(grad_loss)
        factor = grad_loss if ctx.factor is None else grad_loss * ctx.factor
        if ctx.made_in_forward:
            refuse_second_derivatives()
            gradients, ctx.gradients = ctx.gradients, None
            if gradients is None:
                raise UserError(
                    "backward ran a second time through a linear cross-entropy that computes its gradients in forward "
                    "and has given them away; pass recompute=True to keep the graph"
                )
            found = _scaled(gradients, factor, ctx.path, ctx.dtypes)
        else:
            saved = ctx.saved_tensors  # A checkpoint gives them once.
            gradients = partial(_recomputed, saved[:5], saved[5:], factor, ctx.call, ctx.path)
            found = without_second_derivatives(gradients, *saved[:3], grad_loss)
        return *found, *[None] * 5


def _recomputed(
    tensors: tuple[Any, ...], saved: tuple[Tensor, ...], factor: Tensor, call: HeadCall, path: KernelPath
) -> tuple[Tensor | None, ...]:
    """Return the gradients, from logits computed again. Factors per token act before tokens are summed; so does one for
    all tokens where rows have factors anyway. Elsewhere it acts last, and cannot underflow. That of an ignored token is
    zero, as 0 * inf is not a number."""
    hidden_ND, weight_VD, bias_V, targets_N, weights_N = tensors
    lse_N, nll_N, *of_path = saved
    acts_first = call.per_token or path.rows_have_factors
    factor_N = factor.where(targets_N >= 0, 0) if acts_first else None
    if weights_N is not None:
        factor_N = weights_N if factor_N is None else factor_N * weights_N
    with torch.autocast(hidden_ND.device.type, enabled=False):
        inputs = Inputs(hidden_ND.to(call.compute_dtype), weight_VD.to(call.compute_dtype), bias_V, targets_N)
        found = path.backward(inputs, KnownRows(lse_N, nll_N, factor_N), tuple(of_path), call)
    dtypes = tuple(None if tensor is None else tensor.dtype for tensor in tensors[:3])
    return _scaled(found, None if acts_first else factor, path, dtypes)


def _scaled(
    gradients: Gradients, factor: Tensor | None, path: KernelPath, dtypes: tuple[torch.dtype | None, ...]
) -> tuple[Tensor | None, ...]:
    """Return the gradients in their inputs' dtypes, times the factor: in place, as nothing else refers to them. Ignored
    tokens have none, whatever the factor."""
    for gradient in gradients.each() if factor is not None else ():
        if gradient is not None:
            path.kernels.scale_(gradient, factor)
    return tuple(g if g is None else g.to(dtype) for g, dtype in zip(gradients.each(), dtypes, strict=True))


def _forward(operands: Operands) -> list[Tensor]:
    """Return loss, four sums, the factor left for backward, and gradients or each token's log-sum-exp and nll."""
    rows = operands.checked_rows()
    call, factor = rows.call, rows.inverse_count
    loss, *sums_and_more = _LinearCrossEntropy.forward(*rows.tensors, rows.weights_N, factor, call, rows.path)
    if factor is None or (call.gradients_in_forward and call.factor_in_forward):
        factor = loss.new_ones(())
    found = [rows.placed(loss) if call.per_token else loss, *sums_and_more[:4], factor]
    if call.gradients_in_forward:
        return found + as_results(sums_and_more[4].each(), rows, operands, unscaled=True)
    return found + [rows.placed(numbers_N) for numbers_N in sums_and_more[4:]]


def _forward_shapes(operands: Operands) -> list[Tensor]:
    shape, options = operands.targets.shape, operands.options
    loss = empty(operands, shape if options.reduction == "none" else ())
    nll, lse_squared, entropy, factor = (empty(operands) for _ in range(4))
    found = [loss, nll, lse_squared, empty(operands, dtype=torch.int64), entropy, factor]
    if options.gradients_in_forward(operands.wanted):
        return found + empty_gradients(operands, unscaled=True)
    return [*found, empty(operands, shape), empty(operands, shape)]


def _backward(rows: PreparedRows, factor: Tensor, lse: Tensor, nll: Tensor) -> tuple[Tensor | None, ...]:
    factor = rows.of(factor) if rows.call.per_token else factor
    return _recomputed((*rows.tensors, rows.weights_N), (rows.of(lse), rows.of(nll)), factor, rows.call, rows.path)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    operands = of_schema(*inputs)
    ctx.made_in_forward = operands.options.gradients_in_forward(operands.wanted)
    ctx.others, ctx.wanted = inputs[TENSORS:], operands.wanted
    ctx.save_for_backward(*inputs[:TENSORS], *output[5:])


def _operator_gradients(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    tensors, factor, saved = saved[:TENSORS], grads[0] * saved[TENSORS], saved[TENSORS + 1 :]
    if ctx.made_in_forward:
        found = [gradient.where(gradient == 0, gradient * factor) for gradient in saved]
    else:
        found = _operator_backward(factor, *saved, *tensors, *ctx.others)
    return of_operands(found, tensors, ctx.wanted)


_operator = operator("linear_cross_entropy", 0, _forward, _forward_shapes)
_operator_backward = backward_operator("linear_cross_entropy", 3, _backward)
_operator.register_autograd(_operator_gradients, setup_context=_save_for_backward)
