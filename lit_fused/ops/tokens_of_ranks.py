"""The path of ranks that divide a vocabulary and have different tokens, as under FSDP2 without a gathered head.

All ranks gather the hidden states of a block of tokens and compute their own columns for it, by the path of ranks that
have the same tokens. Each keeps its own tokens' results and gradients. The gradient of its rows of the weight is
complete, as it has seen all tokens. A block has few hidden states beside the weight's numbers.

N tokens, R ranks, D hidden, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .kernel_path import ChoosePath, ForwardResult, Gradients, HeadCall, Inputs, KernelPath, KnownRows, RowResults

LEAST_ROWS = 8192  # of a block, over all ranks
_OF_VOCABULARY = 8  # A block has up to V / 8 rows: its hidden states and their gradient are little beside a weight.


class TokensOfRanks(KernelPath):
    """The path of this rank's tokens, given that of the tokens of all ranks."""

    rows_have_factors = True  # They are gathered, as ranks may have different ones.

    def __init__(self, hidden_ND: Tensor, weight_VD: Tensor, call: HeadCall, path_of: ChoosePath) -> None:
        self.path_of = path_of
        super().__init__(path_of(hidden_ND, weight_VD, _together(call)).kernels)

    def forward(self, inputs: Inputs, factor_N: Tensor | None, call: HeadCall) -> ForwardResult:
        together, sums = _together(call), _Sums(call)
        results = RowResults.zeros(len(inputs.targets_N), inputs.hidden_ND.device, call)
        for block, of_all, given_N in self._blocks(inputs, call, factor_N):
            path = self.path_of(of_all.hidden_ND, of_all.weight_VD, together)
            found = path.forward(of_all, given_N, together)
            assert not found.saved
            for mine, of_block in zip(results.of(block.rows), found.rows.of(block.own), strict=True):
                if mine is not None and of_block is not None:
                    mine.copy_(of_block)
            if found.gradients is not None:
                sums.add(found.gradients, block.own)
        return ForwardResult(results, sums.finish() if call.gradients_in_forward else None)

    def backward(self, inputs: Inputs, known: KnownRows, saved: tuple[Tensor, ...], call: HeadCall) -> Gradients:
        together, sums = _together(call), _Sums(call)
        for block, of_all, known_of_all in self._blocks(inputs, call, known):
            path = self.path_of(of_all.hidden_ND, of_all.weight_VD, together)
            sums.add(path.backward(of_all, known_of_all, (), together), block.own)
        return sums.finish()

    def logits_of(self, entries_NK: Tensor, inputs: Inputs, call: HeadCall) -> Tensor:
        together, found = _together(call), []
        for block, of_all, entries in self._blocks(inputs, call, entries_NK):
            path = self.path_of(of_all.hidden_ND, of_all.weight_VD, together)
            found.append(path.logits_of(entries, of_all, together)[block.own].clone())
        return torch.cat(found)

    def _blocks(self, inputs: Inputs, call: HeadCall, more: Any) -> Iterator[tuple["_Block", Inputs, Any]]:
        """Yield blocks of tokens, the inputs and what else each token has, of all ranks; at least one block."""
        assert call.shard is not None
        group, rows = call.shard.group, max(LEAST_ROWS, call.vocabulary // _OF_VOCABULARY)
        sizes = sizes_of_ranks(len(inputs.targets_N), inputs.hidden_ND.device, group)
        each = max(rows // len(sizes), 1)
        for start in range(0, max(*sizes, 1), each):
            block = _Block(start, [min(max(size - start, 0), each) for size in sizes], group)
            hidden_ND, targets_N = block.gathered(inputs.hidden_ND), block.gathered(inputs.targets_N)
            yield block, inputs._replace(hidden_ND=hidden_ND, targets_N=targets_N), block.gathered(more)


class _Block:
    """The tokens of each rank from ``start`` on, as many as ``sizes`` says."""

    def __init__(self, start: int, sizes: list[int], group: dist.ProcessGroup) -> None:
        rank = dist.get_rank(group)
        before, count = sum(sizes[:rank]), sizes[rank]
        self.sizes, self.group = sizes, group
        self.rows, self.own = slice(start, start + count), slice(before, before + count)  # here, and in the block

    def gathered(self, numbers: Any) -> Any:
        """Return a tensor (N, ...) of this rank's tokens as that of the block, one rank after the other; None as None,
        and a tuple of such as one."""
        if isinstance(numbers, tuple):
            return type(numbers)(*map(self.gathered, numbers))
        if numbers is None:
            return None
        return rows_of_ranks(numbers[self.rows], self.sizes, self.group)


class _Sums:
    """The gradients of this rank's tokens, and those of its rows of the weight and bias, summed over blocks."""

    def __init__(self, call: HeadCall) -> None:
        self.exact, self.hidden, self.of_rows = call.result_dtype, list[Tensor](), list[Tensor | None]()

    def add(self, found: Gradients, own: slice) -> None:
        hidden_ND, *of_rows = found
        if hidden_ND is not None:
            self.hidden.append(hidden_ND[own].clone())
        if not self.of_rows:
            self.of_rows = of_rows
            return
        for place, (total, more) in enumerate(zip(self.of_rows, of_rows, strict=True)):
            if total is not None and more is not None:
                self.of_rows[place] = total.to(self.exact).add_(more)

    def finish(self) -> Gradients:
        return Gradients(torch.cat(self.hidden) if self.hidden else None, *self.of_rows)


def sizes_of_ranks(rows: int, device: torch.device, group: dist.ProcessGroup) -> list[int]:
    """Return how many rows each rank has. On a GPU the host waits for it."""
    sizes = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(sizes, torch.tensor([rows], device=device), group=group)
    return sizes.tolist()


def padded_rows(rows: Tensor, count: int) -> Tensor:
    """Return ``count`` rows (n, ...): those given, and zeros."""
    return F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, count - len(rows)))


def rows_of_ranks(own: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return the rows (n, ...) of one rank after the other, of which each has as many as ``sizes`` says."""
    most = max(sizes)
    if not most:
        return own
    found = own.new_empty(len(sizes) * most, *own.shape[1:])
    dist.all_gather_into_tensor(found, padded_rows(own, most).contiguous(), group=group)
    if min(sizes) == most:
        return found
    return torch.cat([part[:size] for part, size in zip(found.split(most), sizes, strict=True)])


def _together(call: HeadCall) -> HeadCall:
    """Return the call of ranks that have the same tokens."""
    assert call.shard is not None
    return replace(call, shard=replace(call.shard, tokens_differ=False))
