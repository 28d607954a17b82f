"""Exact linear cross-entropy, one chunk of tokens at a time: our own head, and the project's default.

The logits of a chunk are computed into one buffer, turned into losses and into their own gradient, and two more matrix
products carry that gradient to hidden states and weight. All of it happens in *forward*; backward scales by the
incoming scalar. That is 6NDV operations, the minimum of an exact head, and the memory of one chunk and of the
gradients. ``recompute=True`` keeps two numbers per token instead, and computes the logits again in backward (8NDV);
``reduction="none"`` always does, because each token's incoming gradient is known only there.

N tokens, C chunk, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .first_derivatives import refuse_second_derivatives, without_second_derivatives
from .frozen_columns import whole_weight
from .hopper import hopper_path, narrow_path
from .invariant.invariant_path import InvariantPath, tile_kernels
from .kernel_path import Gradients, HeadCall, KernelPath, KnownRows, Rows
from .label_checks import IGNORE_INDEX, check_token_weights
from .logits.logits_path import LogitsPath
from .logits.rows_torch import TorchRows
from .operators import empty_gradients, empty_rows, gradient_shapes, one_graph_break, operator
from .options import LossOptions
from .tokens_of_ranks import TokensOfRanks
from .triton_available import kernels_can_be_built
from .user_error import UserError
from .vocabulary_parallel import VocabularyShard


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
    invariant: bool = False,
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
            of the tokens. None is 32 on a CPU, and on a GPU a fiftieth of its memory, at least 448 (and no more with
            ``shard``), but no more than 2816 rows or 2^22 / D.
        chunk_size: the rows C themselves, instead of a budget; rounded up to a multiple of 128.
        invariant: compute each token's numbers in an order that depends on nothing but its own row: the same bits
            whatever other tokens are there, in whatever chunks and order, and on however many ranks. Gradients are
            computed in backward, as fast as ever and not invariant. On a CPU and on Hopper GPUs; without smoothing.
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
        invariant=invariant,
    )
    weight = whole_weight(weight) if invariant else weight
    call = HeadCall.here(options, hidden_states, weight, bias, ignore_index, shard=shard)
    return loss_of(hidden_states, weight, bias, targets, token_weights, call)


def loss_of(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    token_weights: Tensor | None,
    call: HeadCall,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the statistics of a call."""
    if call.options.invariant and call.path_of is not None:
        raise UserError("the filtered backward and distillation have no invariant=True; linear_cross_entropy has it")
    if call.shard is not None and call.path_of is not None:
        call.shard.refuse_own_tokens("the filtered backward, as distillation from a teacher beside,")
    if token_weights is not None:
        check_token_weights(token_weights, hidden_states)
    # An operator cannot be given one of these.
    if call.shard is not None or call.path_of is not None or call.frozen is not None:
        apply: Any = _apply_outside_of_a_graph
    else:  # A compiler cannot trace an autograd function of which no gradient is wanted.
        traceable = any(call.wanted) or not torch.compiler.is_compiling()
        apply = _LinearCrossEntropy.apply if traceable else _LinearCrossEntropy.forward
    loss, *sums = apply(hidden_states, weight, bias, targets, token_weights, call)
    names = ("nll", "lse_squared", "correct", "entropy") if call.options.statistics else ("nll", "lse_squared")
    return loss, dict(zip(names, sums, strict=False)) | dict(zip(call.own_statistics, sums[4:], strict=False))


class _LinearCrossEntropy(torch.autograd.Function):
    """Eager and compiled calls have this one; compiled, ``_forward`` and ``_backward`` are operators."""

    @staticmethod
    def forward(*tensors_and_call: Any) -> tuple[Tensor, ...]:
        forward = _forward_operator if torch.compiler.is_compiling() else _forward
        return tuple(forward(*tensors_and_call))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.call = inputs
        ctx.set_materialize_grads(False)  # of all outputs but the loss: zeros that nothing reads
        ctx.mark_non_differentiable(*output[1:])
        for_backward = output[5 + len(ctx.call.own_statistics) :]
        ctx.save_for_backward(*(() if ctx.call.gradients_in_forward else tensors), *for_backward)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_loss, call = grads[0], ctx.call
        if grad_loss is None:  # Nothing depends on the loss.
            return (None,) * 6
        saved = ctx.saved_tensors
        if call.gradients_in_forward:
            if torch.is_grad_enabled():
                refuse_second_derivatives()
            count = sum(call.wanted)
            found = _scaled(saved[:count], grad_loss if len(saved) == count else grad_loss * saved[count])
        else:
            tensors, (lse, nll, *of_path) = saved[:5], saved[5:]
            backward = _backward_operator if torch.compiler.is_compiling() else _backward
            found = without_second_derivatives(
                lambda: backward(grad_loss, lse, nll, *tensors, call, *of_path), *tensors[:3], grad_loss
            )
        return *call.in_places(found), None, None, None


_apply_outside_of_a_graph = one_graph_break(_LinearCrossEntropy.apply)


def _forward(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    token_weights: Tensor | None,
    call: HeadCall,
) -> list[Tensor]:
    """Return the loss, its sums, and for backward the gradients and their factor, or the numbers to compute them of."""
    rows = Rows(hidden_states, weight, bias, targets, call, call.path_of or exact_path)
    call, weights_N = rows.call, None if token_weights is None else rows.weights_of(token_weights)
    factor, factor_N = rows.inverse_count(weights_N), weights_N
    if factor is not None and call.factor_in_forward:
        factor_N = factor.expand(len(rows.inputs.targets_N)) if weights_N is None else factor * weights_N
        factor_N = factor_N.contiguous()
    with torch.autocast(hidden_states.device.type, enabled=False):
        numbers, gradients, saved, own_sums = rows.path.forward(rows.inputs, factor_N, call)
    loss = numbers.loss if weights_N is None else numbers.loss * weights_N
    if not call.per_token:
        loss = loss.sum() if factor is None else loss.sum() * factor
    sums = numbers.nll.sum(), numbers.lse.square().sum(), numbers.correct.sum(), numbers.entropy.sum(), *own_sums
    if gradients is None:
        loss = rows.placed(loss) if call.per_token else loss
        return [loss, *sums, rows.placed(numbers.lse), rows.placed(numbers.nll), *saved]
    found = rows.wanted(gradients, hidden_states, call.stored_dtypes(hidden_states, weight))
    return [loss, *sums, *found] if factor is None or call.factor_in_forward else [loss, *sums, *found, factor]


def _backward(
    grad_loss: Tensor,
    lse: Tensor,
    nll: Tensor,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    token_weights: Tensor | None,
    call: HeadCall,
    *saved: Tensor,
) -> list[Tensor]:
    """Return the gradients that are wanted, from logits computed again."""
    # A factor for all tokens acts last, where it cannot underflow, unless rows have factors anyway; those per token
    # act before tokens are summed. That of an ignored token is zero, as 0 * inf is not a number.
    rows = Rows(hidden_states, weight, bias, targets, replace(call, checked=True), call.path_of or exact_path)
    call, weights_N = rows.call, None if token_weights is None else rows.weights_of(token_weights)
    factor = rows.of(grad_loss) if call.per_token else grad_loss
    inverse_count = rows.inverse_count(weights_N)
    factor = factor if inverse_count is None else factor * inverse_count
    acts_first = call.per_token or rows.path.rows_have_factors
    factor_N = factor.where(rows.inputs.targets_N >= 0, 0) if acts_first else None
    if weights_N is not None:
        factor_N = weights_N if factor_N is None else factor_N * weights_N
    with torch.autocast(hidden_states.device.type, enabled=False):
        found = rows.path.backward(rows.inputs, KnownRows(rows.of(lse), rows.of(nll), factor_N), saved, call)
    if not acts_first:
        found = Gradients(*call.in_places(_scaled([x for x in found if x is not None], factor)))
    return rows.wanted(found, hidden_states, (hidden_states.dtype, weight.dtype, None if bias is None else bias.dtype))


def _scaled(gradients: Sequence[Tensor], factor: Tensor) -> Sequence[Tensor]:
    """Return the gradients times the factor. Ignored tokens have none, whatever the factor."""
    if torch.compiler.is_compiling():
        return [gradient.where(gradient == 0, gradient * factor) for gradient in gradients]
    for gradient in gradients:  # in place: nothing else refers to them
        row_kernels(factor).scale_(gradient, factor)
    # A kernel's writing is unknown to autograd, which refuses a second backward through what was changed.
    torch.autograd.graph.increment_version(gradients)
    return gradients


def _forward_shapes(*tensors_and_call: Any) -> list[Tensor]:
    *operands, targets, _, call = tensors_and_call
    per_token, number = empty_rows(targets, call), targets.new_empty((), dtype=call.result_dtype)
    sums = [per_token if call.per_token else number, number.clone(), number.clone(), number.long(), number.clone()]
    if not call.gradients_in_forward:
        return [*sums, per_token.clone(), per_token.clone()]
    has_factor = call.options.reduction == "mean" and not call.factor_in_forward
    return [*sums, *empty_gradients(operands, call, call.stored_dtypes(*operands[:2])), *[number.clone()] * has_factor]


_forward_operator = operator("linear_cross_entropy", 5, _forward, _forward_shapes)
_backward_operator = operator("linear_cross_entropy_backward", 8, _backward, gradient_shapes)


def exact_path(hidden_ND: Tensor, weight_VD: Tensor, call: HeadCall) -> KernelPath:
    """Return the exact path for these tensors: Hopper's where it can run, on at least one row."""
    if call.shard is not None and call.shard.tokens_differ:
        return TokensOfRanks(hidden_ND, weight_VD, call, exact_path)
    if call.options.invariant:
        fast = exact_path(hidden_ND, weight_VD, replace(call, options=replace(call.options, invariant=False)))
        return InvariantPath(tile_kernels(hidden_ND, call), fast)
    is_whole = call.frozen is None and len(hidden_ND) > 0
    if is_whole and hidden_ND.is_cuda and hopper_path.supports(hidden_ND, weight_VD, call):
        return narrow_path.NarrowPath() if narrow_path.computes(hidden_ND, call) else hopper_path.HopperPath()
    return LogitsPath(row_kernels(hidden_ND))


def row_kernels(hidden_ND: Tensor) -> TorchRows:
    """Return Triton's row work where it can run, else PyTorch's."""
    if hidden_ND.is_cuda and hidden_ND.dtype != torch.float64 and kernels_can_be_built():
        from .logits.rows_triton import TritonRows

        return TritonRows()
    return TorchRows()
