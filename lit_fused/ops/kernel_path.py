"""A call of a head, its rows, and the interface of the kernel paths that compute it.

C rows of a chunk, N tokens, D hidden, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .frozen_columns import FrozenColumns, frozen_columns
from .label_checks import IGNORE_INDEX, check_inputs
from .options import LossOptions, budget_mib, chunk_rows, enough_rows
from .vocabulary_parallel import VocabularyShard


class Inputs(NamedTuple):
    """The tensors of a call; hidden states and weight are in the dtype of the products."""

    hidden_ND: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None
    targets_N: Tensor  # int64, negative where ignored


class Wanted(NamedTuple):
    """The inputs that need a gradient."""

    hidden: bool
    weight: bool
    bias: bool


@dataclass(eq=False)
class HeadCall:
    """Everything about one call that is not a tensor.

    Attributes:
        ignore_index: the target of ignored tokens.
        compute_dtype: of the products.
        wanted: the inputs that need a gradient.
        checked: whether the tensors have been checked, and targets are negative where ignored.
        shard: this rank's part of a divided vocabulary.
        top1: whether results have the entry of each row's largest logit.
        path_of: chooses the path of hidden states (N, D) and weight (V, D) instead of the exact one.
        own_statistics: the names of the sums over tokens that this path adds.
        frozen: the first columns of the weight, which is (V, R) then.
        padded_gradient: the weight's gradient gets a free row before it, for :func:`with_padded_gradient`.
        vocabulary: entries of all ranks together, over which label smoothing spreads.
        weight_dtype: of the weight as the caller has it; autocast casts it to ``compute_dtype``.
        budget_mib: the size of a chunk.
        enough_rows: of a chunk; None where a budget was chosen.
    """

    options: LossOptions
    ignore_index: int
    compute_dtype: torch.dtype
    wanted: Wanted
    checked: bool = False
    shard: VocabularyShard | None = None
    top1: bool = False
    path_of: "ChoosePath | None" = None
    own_statistics: tuple[str, ...] = ()
    frozen: FrozenColumns | None = None
    # ``Rows`` fills in the rest, in a copy.
    padded_gradient: bool = False
    vocabulary: int = 0
    weight_dtype: torch.dtype = torch.float32
    budget_mib: float = 0.0
    enough_rows: int | None = None

    @classmethod
    def here(
        cls,
        options: LossOptions,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ignore_index: int = IGNORE_INDEX,
        **more: Any,
    ) -> "HeadCall":
        """Return a call under this autocast, with gradients enabled or not."""
        device_type, enabled = hidden_states.device.type, torch.is_grad_enabled()
        # Autocast leaves float64 alone.
        autocast = torch.is_autocast_enabled(device_type) and hidden_states.dtype != torch.float64
        dtype = torch.get_autocast_dtype(device_type) if autocast else hidden_states.dtype
        has_bias = bias is not None and bias.requires_grad
        wanted = Wanted(enabled and hidden_states.requires_grad, enabled and weight.requires_grad, enabled and has_bias)
        if options.invariant or (not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()):
            options = replace(options, recompute=True)  # torch.func runs every backward as if for a second derivative.
        return cls(options, ignore_index, dtype, more.pop("wanted", wanted), frozen=frozen_columns(weight), **more)

    def __post_init__(self) -> None:
        self.result_dtype = torch.promote_types(self.compute_dtype, torch.float32)  # of losses and sums over tokens
        # Each token has an incoming gradient of its own.
        self.per_token = self.options.reduction == "none"
        # An exact path makes the gradients in forward. It multiplies them by their factor there, but not in float16,
        # where small ones would be lost.
        self.gradients_in_forward = any(self.wanted) and not self.options.recompute and not self.per_token
        self.factor_in_forward = self.gradients_in_forward and self.compute_dtype != torch.float16

    def chunk_rows(self, tokens: int, row_bytes: float, **more: int) -> int:
        """Return the rows of a chunk whose logits are stored."""
        options = self.options
        return chunk_rows(tokens, row_bytes, self.budget_mib, options.chunk_size, enough=self.enough_rows, **more)

    def in_places(self, gradients: Iterable[Tensor]) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, weight and bias, None where it is not wanted."""
        found, (hidden, weight, bias) = iter(gradients), self.wanted
        return next(found) if hidden else None, next(found) if weight else None, next(found) if bias else None

    def stored_dtypes(self, hidden_states: Tensor, weight: Tensor) -> tuple[torch.dtype, ...]:
        """Return the dtypes in which the three gradients wait for backward: bfloat16 ones are rounded at once, to hold
        half the bytes; float16 ones could overflow before they are scaled."""
        half, result = torch.bfloat16, self.result_dtype
        of_hidden = self.compute_dtype if self.shard is None else result
        rounded = self.options.float32_accumulation is False and self.compute_dtype == half
        of_weight = half if weight.dtype == half or rounded else result
        return half if hidden_states.dtype == half else of_hidden, of_weight, result


class RowResults(NamedTuple):
    """One number per token of each kind, written by the kernels."""

    loss: Tensor
    lse: Tensor
    nll: Tensor
    entropy: Tensor
    correct: Tensor  # bool
    top1: Tensor | None  # int64, -1 where ignored

    @classmethod
    def zeros(cls, count: int, device: torch.device, call: HeadCall) -> "RowResults":
        loss = torch.zeros(count, dtype=call.result_dtype, device=device)
        lse, nll, entropy = torch.zeros_like(loss), torch.zeros_like(loss), torch.zeros_like(loss)
        correct = torch.zeros(count, dtype=torch.bool, device=device)
        top1 = torch.full((count,), -1, device=device) if call.top1 else None
        return cls(loss, lse, nll, entropy, correct, top1)

    def of(self, rows: slice) -> "RowResults":
        """Return views of some rows."""
        loss, lse, nll, entropy, correct, top1 = self
        top1 = None if top1 is None else top1[rows]
        return RowResults(loss[rows], lse[rows], nll[rows], entropy[rows], correct[rows], top1)


class LogitsGradient(NamedTuple):
    """Each row's gradient of the logits, (N,) each: p (base + slope log p) - uniform, plus ``target`` at the target."""

    lse_N: Tensor
    base_N: Tensor | None  # None stands for one
    slope_N: Tensor | None
    uniform_N: Tensor | None
    target_N: Tensor
    nll_N: Tensor | None = None  # has the digits of a confident row's 1 - p, which the log-sum-exp has not

    @classmethod
    def of_loss(
        cls, lse_N: Tensor, factor_N: Tensor | None, call: HeadCall, nll_N: Tensor | None = None
    ) -> "LogitsGradient":
        """Return the gradient of ``loss * factor``: with e the label smoothing and z the weight of the z-loss, that of
        the loss is p (1 + 2 z lse) - e / V, and at the target 1 - e less."""
        smoothing, z_loss = call.options.label_smoothing, call.options.z_loss
        base_N = 1 + 2 * z_loss * lse_N if z_loss else None
        if factor_N is not None:
            base_N = factor_N if base_N is None else base_N * factor_N
        factor_N = torch.ones_like(lse_N) if factor_N is None else factor_N
        uniform_N = factor_N * (smoothing / call.vocabulary) if smoothing else None
        return cls(lse_N, base_N, None, uniform_N, factor_N * (smoothing - 1), nll_N)

    def at(self, rows: slice | Tensor) -> "LogitsGradient":
        """Return the numbers of some rows."""
        return LogitsGradient(*(None if number_N is None else number_N[rows] for number_N in self))  # type: ignore[arg-type]


class Chosen(NamedTuple):
    """Entries of each row whose gradient is written over what :class:`LogitsGradient` says, for it has more terms."""

    entries_NK: Tensor  # int64, negative where none
    gradient_NK: Tensor  # of scale * product + bias


class KnownRows(NamedTuple):
    """Each row's numbers from forward with the factor of its loss, or for token scores its logits' gradient."""

    lse_N: Tensor
    nll_N: Tensor
    factor_N: Tensor | None  # None stands for one
    gradient: LogitsGradient | None = None
    chosen: Chosen | None = None

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Return base and slope where the gradient is more than a factor of each row's probabilities."""
        if self.gradient is None or (self.gradient.slope_N is None and self.chosen is None):
            return ()
        base_N, slope_N = self.gradient.base_N, self.gradient.slope_N
        assert base_N is not None
        return base_N, torch.zeros_like(base_N) if slope_N is None else slope_N

    def at(self, rows: Tensor) -> "KnownRows":
        """Return the numbers of the rows with these indices, of a loss."""
        return KnownRows(self.lse_N[rows], self.nll_N[rows], None if self.factor_N is None else self.factor_N[rows])


class Gradients(NamedTuple):
    """Gradients of the summed loss with respect to hidden states (N, D), weight (V, D) and bias (V,), where wanted."""

    hidden_ND: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None


class ForwardResult(NamedTuple):
    """The results of forward: with the gradients, or with what the path saves to make them in backward."""

    rows: RowResults
    gradients: Gradients | None = None
    saved: tuple[Tensor, ...] = ()
    statistics: tuple[Tensor, ...] = ()  # the path's own sums over tokens, named by the call's ``own_statistics``


class KernelPath(ABC):
    """One way to compute losses and gradients, with the kernels that it launches."""

    rows_have_factors: bool  # backward multiplies rows by a factor at no cost

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels

    @abstractmethod
    def forward(self, inputs: Inputs, factor_N: Tensor | None, call: HeadCall) -> ForwardResult:
        """Return every row's results and, if the call wants them now, gradients of ``(loss * factor_N).sum()``."""

    @abstractmethod
    def backward(self, inputs: Inputs, known: KnownRows, saved: tuple[Tensor, ...], call: HeadCall) -> Gradients:
        """Return the gradients of ``(loss_N * factor_N).sum()``, or those that ``known`` gives."""

    @abstractmethod
    def logits_of(self, entries_NK: Tensor, inputs: Inputs, call: HeadCall) -> Tensor:
        """Return the logits (N, K) of K entries per token, undefined where an entry is negative."""


ChoosePath = Callable[[Tensor, Tensor, HeadCall], KernelPath]


class Rows:
    """The tensors of a call as rows, and the path for them. What a call ignores is left out where it would cost."""

    def __init__(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        call: HeadCall,
        path_of: ChoosePath,
    ) -> None:
        vocabulary = weight.shape[0] if call.shard is None else call.shard.vocabulary
        if not call.checked:
            if call.shard is not None:
                call.shard.check(weight)
            check_inputs(hidden_states, weight, targets, bias, call.ignore_index, vocabulary)
        targets = targets.long()
        if call.ignore_index >= 0:
            targets = targets.masked_fill(targets == call.ignore_index, IGNORE_INDEX)
        self.call = call = copy(call)
        call.vocabulary, call.weight_dtype = vocabulary, weight.dtype
        chosen, device = call.options.logits_budget_mib, hidden_states.device
        call.budget_mib = chosen or budget_mib(device, call.shard)
        call.enough_rows = None if chosen else enough_rows(hidden_states.shape[-1], device)
        # Kernels write to addresses that are multiples of 16 bytes.
        call.padded_gradient = hasattr(weight, _PADDED) and weight.shape[1] % 8 == 0
        hidden_ND = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        targets_N = targets.reshape(-1).clamp(min=-1)
        self.shape, self.valid_N = targets.shape, targets_N >= 0
        self.path, self._taken_N = path_of(hidden_ND, weight, call), None
        if call.options.drop_ignored or not self.path.kernels.handles_ignored:
            valid_N = indices_of(self.valid_N)
            if len(valid_N) < len(targets_N):
                self._taken_N, hidden_ND, targets_N = valid_N, hidden_ND[valid_N], targets_N[valid_N]
                self.path = path_of(hidden_ND, weight, call)
        dtype, bias = call.compute_dtype, None if bias is None else bias.contiguous()
        self.inputs = Inputs(hidden_ND.to(dtype), weight.to(dtype), bias, targets_N)

    def weights_of(self, token_weights: Tensor) -> Tensor:
        """Return the weight of each row's token, zero where it is ignored."""
        return self.of(token_weights.to(self.call.result_dtype)).where(self.inputs.targets_N >= 0, 0)

    def inverse_count(self, weights_N: Tensor | None) -> Tensor | None:
        """Return the factor () that makes a mean of the sum over valid tokens, if the call asks for a mean."""
        if self.call.options.reduction != "mean":
            return None
        if weights_N is None:
            return 1 / self.valid_N.sum().clamp(min=1).to(self.call.result_dtype)
        total = weights_N.sum()
        return 1 / total.where(total != 0, 1)

    def wanted(
        self, gradients: "Gradients", hidden_states: Tensor, dtypes: Sequence[torch.dtype | None]
    ) -> list[Tensor]:
        """Return the gradients that are wanted in these dtypes, that of the hidden states in their shape."""
        (hidden_ND, weight_VD, bias_V), found = gradients, []
        if hidden_ND is not None:
            found.append(self.placed(hidden_ND).view_as(hidden_states).to(dtypes[0]))
        if weight_VD is not None:
            found.append(weight_VD.to(dtypes[1]))
        if bias_V is not None:
            found.append(bias_V.to(dtypes[2]))
        return found

    def of(self, numbers: Tensor) -> Tensor:
        """Return numbers of each target, or K of them, as those of the rows that are not left out."""
        rows = numbers.reshape(len(self.valid_N), *numbers.shape[len(self.shape) :])
        return rows if self._taken_N is None else rows.index_select(0, self._taken_N)

    def placed(self, rows: Tensor, otherwise: int = 0) -> Tensor:
        """Return results in the shape of the targets, and of what a row has; ``otherwise`` where one was left out."""
        if self._taken_N is not None:
            everywhere = rows.new_full((len(self.valid_N), *rows.shape[1:]), otherwise)
            rows = everywhere.index_copy(0, self._taken_N, rows)
        return rows.view((*self.shape, *rows.shape[1:]))


def indices_of(valid_N: Tensor) -> Tensor:
    """Return the indices of valid tokens: on a GPU the host waits for it."""
    return valid_N.nonzero()[:, 0]


# An attribute, so that nothing that is made of the weight has it: a gradient that two tensors share is not written to.
_PADDED = "_padded_gradient"


def with_padded_gradient(weight: Tensor) -> Tensor:
    """Return the weight (V, D). Its gradient will be a view into a (V + 1, D) buffer whose first row is free, so that
    an embedding table with a padding row needs no copy."""
    setattr(weight, _PADDED, True)
    return weight


class GradientSums:
    """The gradients while they are summed up, and the exchange of the hidden states' between ranks."""

    has_begun = False  # The weight's has numbers: what comes is added, else written.

    def __init__(self, inputs: Inputs, call: HeadCall, weight_dtype: torch.dtype) -> None:
        """Allocate the gradients that are wanted: the bias' is zero, the others are uninitialised."""
        hidden_ND, weight_VD = inputs.hidden_ND, inputs.weight_VD
        self.inputs, self.scale = inputs, call.options.scale
        self.group = None if call.shard is None else call.shard.group
        self.exchanges: list[dist.Work] = []
        # A sum over ranks is in float32: in half precision each rank's part would be rounded once more.
        hidden_dtype = hidden_ND.dtype if self.group is None else call.result_dtype
        self.hidden_ND = torch.empty_like(hidden_ND, dtype=hidden_dtype) if call.wanted.hidden else None
        self.weight_VD = None
        if call.wanted.weight and call.padded_gradient:
            padded = weight_VD.new_empty((len(weight_VD) + 1, weight_VD.shape[1]), dtype=weight_dtype)
            self.weight_VD = padded[1:]
        elif call.wanted.weight:
            self.weight_VD = torch.empty_like(weight_VD, dtype=weight_dtype)
        self.bias_V = weight_VD.new_zeros(len(weight_VD), dtype=call.result_dtype) if call.wanted.bias else None

    def begin_with_zeros(self) -> None:
        if self.weight_VD is not None:
            self.weight_VD.zero_()
        self.has_begun = True

    def exchange(self, rows_of_hidden_CD: Tensor) -> None:
        """Start to sum finished rows of the hidden states' gradient over the ranks."""
        if self.group is not None:
            work = dist.all_reduce(rows_of_hidden_CD, group=self.group, async_op=True)
            assert work is not None
            self.exchanges.append(work)

    def finish(self) -> Gradients:
        """Wait for the exchanges, and return the gradients."""
        for exchange in self.exchanges:
            exchange.wait()
        return Gradients(self.hidden_ND, self.weight_VD, self.bias_V)


def own_columns(entries: Tensor, inputs: Inputs, call: HeadCall) -> Tensor:
    """Return entries of the vocabulary as columns of this rank's part of it."""
    return entries if call.shard is None else call.shard.local(entries, len(inputs.weight_VD))
