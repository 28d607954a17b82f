"""The interface of the kernel paths, ``logits`` and ``hopper``.

C rows of a chunk, N tokens, D hidden, V vocabulary.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lit_fused.ops.options import LossOptions
from lit_fused.ops.vocabulary_parallel import VocabularyShard


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


@dataclass(frozen=True)
class HeadCall:
    """Everything about one call that is not a tensor."""

    options: LossOptions
    vocabulary: int  # entries of all ranks together, over which label smoothing spreads
    compute_dtype: torch.dtype
    weight_dtype: torch.dtype  # of the weight as the caller has it; autocast casts it to compute_dtype
    wanted: Wanted
    budget_mib: float
    shard: VocabularyShard | None = None
    top1: bool = False  # Results have the entry of each row's largest logit.
    has_room: bool = False  # The weight's gradient lies behind a free row, for a table around it.

    @property
    def result_dtype(self) -> torch.dtype:
        """Return the dtype of losses, log-sum-exps and sums over tokens: at least float32."""
        return torch.promote_types(self.compute_dtype, torch.float32)

    @property
    def per_token(self) -> bool:
        """Return whether each token has an incoming gradient of its own."""
        return self.options.reduction == "none"

    @property
    def gradients_in_forward(self) -> bool:
        """Return whether an exact path makes the gradients in forward."""
        return self.options.gradients_in_forward(self.wanted)

    @property
    def factor_in_forward(self) -> bool:
        """Return whether forward multiplies these gradients by their factor: in float16 small ones would be lost."""
        return self.compute_dtype != torch.float16


def _rows_of(numbers: tuple[Tensor | None, ...], rows: slice | Tensor) -> list[Any]:
    return [None if number is None else number[rows] for number in numbers]


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
        loss, lse, nll, entropy = (torch.zeros(count, dtype=call.result_dtype, device=device) for _ in range(4))
        correct = torch.zeros(count, dtype=torch.bool, device=device)
        top1 = torch.full((count,), -1, device=device) if call.top1 else None
        return cls(loss, lse, nll, entropy, correct, top1)

    def of(self, rows: slice) -> "RowResults":
        """Return views of some rows."""
        return RowResults(*_rows_of(self, rows))


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
        return LogitsGradient(*_rows_of(self, rows))


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


@dataclass
class Gradients:
    """Gradients of the summed loss with respect to hidden states (N, D), weight (V, D) and bias (V,), where wanted."""

    hidden_ND: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None

    def each(self) -> tuple[Tensor | None, ...]:
        return self.hidden_ND, self.weight_VD, self.bias_V


class ForwardResult(NamedTuple):
    """The results of forward: with the gradients, or with what the path saves to make them in backward."""

    rows: RowResults
    gradients: Gradients | None = None
    saved: tuple[Tensor, ...] = ()
    statistics: tuple[Tensor, ...] = ()  # the path's own sums over tokens, named by its ``own_statistics``


class KernelPath(ABC):
    """One way to compute losses and gradients, with the kernels that it launches."""

    own_statistics: tuple[str, ...] = ()
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


class GradientSums:
    """The gradients while they are summed up, and the exchange of the hidden states' between ranks."""

    def __init__(self, inputs: Inputs, call: HeadCall, weight_dtype: torch.dtype) -> None:
        """Allocate the gradients that are wanted: the bias' is zero, the others are uninitialised."""
        hidden_ND, weight_VD = inputs.hidden_ND, inputs.weight_VD
        self.inputs, self.scale = inputs, call.options.scale
        self.group = None if call.shard is None else call.shard.group
        self.exchanges: list[dist.Work] = []
        # A sum over ranks is in float32: in half precision each rank's part would be rounded once more.
        hidden_dtype = hidden_ND.dtype if self.group is None else call.result_dtype
        self.hidden_ND = torch.empty_like(hidden_ND, dtype=hidden_dtype) if call.wanted.hidden else None
        self.weight_VD = _gradient_like(weight_VD, weight_dtype, call.has_room) if call.wanted.weight else None
        self.bias_V = weight_VD.new_zeros(len(weight_VD), dtype=call.result_dtype) if call.wanted.bias else None

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


def _gradient_like(weight_VD: Tensor, dtype: torch.dtype, has_room: bool) -> Tensor:
    if not has_room:
        return torch.empty_like(weight_VD, dtype=dtype)
    return weight_VD.new_empty((len(weight_VD) + 1, weight_VD.shape[1]), dtype=dtype)[1:]


def write_chosen(gradient_CV: Tensor, columns_CK: Tensor, values_CK: Tensor) -> None:
    """Write values into columns of each row, those outside excepted; a row's equal columns have equal values."""
    width = gradient_CV.shape[1]
    if not width or not columns_CK.shape[1]:
        return
    here_CK = (columns_CK >= 0) & (columns_CK < width)
    # Those that are not here repeat the row's first one that is; a row without any rewrites what it has.
    first_C1 = here_CK.int().argmax(1, keepdim=True)
    columns_CK = columns_CK.where(here_CK, columns_CK.gather(1, first_C1)).where(here_CK.any(1, keepdim=True), 0)
    values_CK = values_CK.where(here_CK, values_CK.gather(1, first_C1)).to(gradient_CV.dtype)
    values_CK = values_CK.where(here_CK.any(1, keepdim=True), gradient_CV.gather(1, columns_CK))
    gradient_CV.scatter_(1, columns_CK, values_CK)
