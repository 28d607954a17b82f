"""The operands of a fused head, as rows, and the path of kernels that computes them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_fused.errors import UserError
from lit_fused.ops.hopper import hopper_path, narrow_path
from lit_fused.ops.kernel_path import HeadCall, KernelPath, Wanted
from lit_fused.ops.label_checks import IGNORE_INDEX, check_inputs, check_selected, check_token_weights, refuse_meta
from lit_fused.ops.logits import logits_path
from lit_fused.ops.options import LossOptions
from lit_fused.ops.vocabulary_parallel import VocabularyShard

_CPU_BUDGET_MIB = 32.0  # A CPU is as fast with small chunks as with large ones.
LEAST_GPU_BUDGET_MIB = 448.0
_GPU_SHARE = 0.01  # of a GPU's memory; docs/evidence/head.md compares it with smaller budgets


class Operands(NamedTuple):
    """The tensors of a call as the caller has them, and everything else that it is called with."""

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    selected: Tensor | None
    token_weights: Tensor | None
    ignore_index: int
    compute_dtype: torch.dtype
    wanted: Wanted
    options: LossOptions

    @classmethod
    def here(cls, tensors: tuple[Any, ...], options: LossOptions, ignore_index: int = IGNORE_INDEX) -> "Operands":
        """Return the operands of a call under this autocast, with gradients enabled or not."""
        return cls._make((*tensors, ignore_index, *computed_here(*tensors[:3]), options))

    def checked_rows(
        self, shard: VocabularyShard | None = None, *, top1: bool = False, path_of: "ChoosePath | None" = None
    ) -> "PreparedRows":
        """Return the rows of operands that fit each other, or raise a UserError."""
        hidden_states, weight, bias, targets, selected, token_weights, ignore_index, *_ = self
        if shard is not None:
            shard.check(weight)
        vocabulary = weight.shape[0] if shard is None else shard.vocabulary
        check_inputs(hidden_states, weight, targets, bias, ignore_index, vocabulary)
        targets = targets.long()
        if selected is not None:
            check_selected(selected, targets, vocabulary)
        if token_weights is not None:
            check_token_weights(token_weights, hidden_states)
        if ignore_index >= 0:
            targets = targets.masked_fill(targets == ignore_index, IGNORE_INDEX)
        return PreparedRows(self._replace(targets=targets), shard, top1=top1, path_of=path_of)


def computed_here(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[torch.dtype, Wanted]:
    """Return the dtype of the products under this autocast, and which gradients a call wants."""
    for name, tensor in (("hidden states", hidden_states), ("an output layer's weight", weight)):
        if not isinstance(tensor, Tensor):
            raise UserError(f"{name} must be a tensor, got {type(tensor).__name__}; of a layer pass layer.weight")
    refuse_meta(hidden_states)
    device_type, operands = hidden_states.device.type, (hidden_states, weight, bias)
    autocast = torch.is_autocast_enabled(device_type) and hidden_states.dtype != torch.float64  # It leaves those alone.
    wanted = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in operands]
    return torch.get_autocast_dtype(device_type) if autocast else hidden_states.dtype, Wanted(*wanted)


ChoosePath = Callable[[Tensor, Tensor, HeadCall], KernelPath]


class PreparedRows:
    """Operands as rows, and the path for them. What a call ignores is left out where it would cost.

    ``path_of`` chooses the path of hidden states (N, D) and weight (V, D) instead of :func:`kernel_path`.
    """

    def __init__(
        self,
        operands: Operands,
        shard: VocabularyShard | None = None,
        *,
        top1: bool = False,
        path_of: ChoosePath | None = None,
    ) -> None:
        hidden_states, weight, bias, targets, selected, token_weights, _, dtype, wanted, options = operands
        if torch._C._are_functorch_transforms_active():
            options = replace(options, recompute=True)  # torch.func differentiates what forward returns
        self.call = call = HeadCall(
            options,
            vocabulary=weight.shape[0] if shard is None else shard.vocabulary,
            compute_dtype=dtype,
            weight_dtype=weight.dtype,
            wanted=wanted,
            budget_mib=options.logits_budget_mib or budget_mib(hidden_states.device, shard),
            shard=shard,
            top1=top1,
            # Kernels write to addresses that are multiples of 16 bytes.
            has_room=hasattr(weight, _ROOM) and weight.shape[1] % 8 == 0,
        )
        self.hidden_ND = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        self.weight_VD, self.bias_V = weight, None if bias is None else bias.contiguous()
        self.shape = targets.shape
        self.targets_N = targets.reshape(-1).clamp(min=-1)  # the caller may change its own before backward
        self.valid_N = self.targets_N >= 0
        path_of = path_of or kernel_path
        self.path = path_of(self.hidden_ND, weight, call)
        self._kept = None
        if options.drop_ignored or not self.path.kernels.handles_ignored:
            self._kept = rows_of(self.valid_N)
            self.hidden_ND, self.targets_N = self.taken(self.hidden_ND), self.taken(self.targets_N)
            self.path = path_of(self.hidden_ND, weight, call)

        self.weights_N = None
        if token_weights is not None:
            self.weights_N = self.of(token_weights.to(call.result_dtype)).where(self.targets_N >= 0, 0)
        self.selected_NK = None if selected is None else self.of(selected.long())

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Return hidden states (N, D), weight (V, D), bias (V,) or None, and targets (N,)."""
        return self.hidden_ND, self.weight_VD, self.bias_V, self.targets_N

    @property
    def inverse_count(self) -> Tensor | None:
        """Return the factor () that makes a mean of the sum over valid tokens, if the call asks for a mean."""
        if self.call.options.reduction != "mean":
            return None
        if self.weights_N is None:
            return 1 / self.valid_N.sum().clamp(min=1).to(self.call.result_dtype)
        total = self.weights_N.sum()
        return 1 / total.where(total != 0, 1)

    def taken(self, rows: Tensor) -> Tensor:
        """Return those of N rows that are not left out."""
        return rows if self._kept is None or len(self._kept) == len(rows) else rows.index_select(0, self._kept)

    def of(self, numbers: Tensor) -> Tensor:
        """Return numbers of each target, or K of them, as those of the rows."""
        return self.taken(numbers.reshape(len(self.valid_N), *numbers.shape[len(self.shape) :]))

    def placed(self, rows: Tensor, otherwise: int = 0) -> Tensor:
        """Return results in the shape of the targets, and of what a row has; ``otherwise`` where one was left out."""
        if self._kept is not None:
            everywhere = rows.new_full((len(self.valid_N), *rows.shape[1:]), otherwise)
            rows = everywhere.index_copy(0, self._kept, rows)
        return rows.view((*self.shape, *rows.shape[1:]))


def rows_of(valid_N: Tensor) -> Tensor:
    """Return the indices of valid tokens: on a GPU the host waits for it."""
    return valid_N.nonzero()[:, 0]


def budget_mib(device: torch.device, shard: VocabularyShard | None = None) -> float:
    """Return the size of a chunk for a device. Ranks that divide a vocabulary cut the same chunks, whatever GPUs they
    have."""
    if device.type == "cpu":
        return _CPU_BUDGET_MIB
    known = device.type == "cuda" and shard is None
    return gpu_budget_mib(torch.cuda.get_device_properties(device).total_memory / 2**20 if known else 0.0)


def gpu_budget_mib(memory_mib: float) -> float:
    """Return the size of a chunk on a GPU: a share of its memory, which is the less missed the more there is."""
    return max(_GPU_SHARE * memory_mib, LEAST_GPU_BUDGET_MIB)


# An attribute, so that nothing that is made of the weight has it: a gradient that two tensors share is not written to.
_ROOM = "_gradient_has_room"


def leave_room(weight: Tensor) -> Tensor:
    """Return a weight (V, D) whose gradient an eager loss makes as the last V of V + 1 rows, for a table around it."""
    setattr(weight, _ROOM, True)
    return weight


def kernel_path(hidden_ND: Tensor, weight_VD: Tensor, call: HeadCall) -> KernelPath:
    """Return the exact path for these tensors: Hopper's where it can run."""
    if hopper_path.supports(hidden_ND, weight_VD, call) and len(hidden_ND):  # its kernels take at least one row
        return narrow_path.NarrowPath() if narrow_path.computes(hidden_ND) else hopper_path.HopperPath()
    return logits_path.LogitsPath(logits_path.row_kernels(hidden_ND))
