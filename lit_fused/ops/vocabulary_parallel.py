"""One rank's part of a vocabulary that ranks divide, under tensor parallelism or under FSDP2."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call

from .user_error import UserError

# The local target of a row whose target is another rank's entry: the row has no column here, but is not ignored.
ELSEWHERE = 2**40


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's part of a vocabulary: the entries from ``start`` on, as many as its weight has rows.

    Attributes:
        start: the first entry of this rank.
        vocabulary: entries of all ranks together; each belongs to one of them.
        largest: rows of the largest part, by which all ranks cut the same chunks.
        group: the ranks. All of them make the same calls, with the same hidden states and targets unless:
        tokens_differ: each rank has tokens of its own, perhaps none, and gets their results. Its weight's gradient is
            that of all ranks' losses. The gradient of a summed loss has to be the same number on all ranks.
    """

    start: int
    vocabulary: int
    largest: int
    group: dist.ProcessGroup
    tokens_differ: bool = False

    @classmethod
    def of(cls, weight: DTensor, *, tokens_differ: bool = False) -> "VocabularyShard":
        """Return the part of a weight (V, D) that this rank has, or raise a UserError if the weight is not divided by
        rows over a mesh "tensor_parallel" (transformers': "tp"), or where tokens differ over any. A weight under FSDP
        is not, outside of the model's own forward."""
        mesh = weight.device_mesh
        named = tokens_differ or mesh.mesh_dim_names in (("tensor_parallel",), ("tp",))
        if not named or weight.placements != (Shard(0),):
            raise UserError(
                f"the output layer's weight is distributed as {weight.placements} over {mesh}; a loss can take it "
                "whole or by rows over the mesh tensor_parallel. Call the loss inside of the model's forward, where "
                "FSDP's weights are whole"
            )
        return replace(cls.on(mesh, weight.shape[0]), tokens_differ=tokens_differ)

    @classmethod
    def on(cls, mesh: DeviceMesh, vocabulary: int) -> "VocabularyShard":
        """Return this rank's part of entries that a mesh of one dimension divides as DTensor does."""
        largest = -(-vocabulary // mesh.size())
        return cls(min(mesh.get_local_rank() * largest, vocabulary), vocabulary, largest, mesh.get_group())

    def first(self, entries: int) -> "VocabularyShard":
        """Return the same rank's part of a vocabulary that ends after ``entries``."""
        start, largest = min(self.start, entries), min(self.largest, entries)
        return replace(self, start=start, vocabulary=entries, largest=largest)

    def local(self, targets_N: Tensor, rows: int) -> Tensor:
        """Return targets as columns of ``rows`` entries here: -1 if ignored, ELSEWHERE if another rank has it."""
        columns_N = targets_N - self.start
        mine_N = (columns_N >= 0) & (columns_N < rows)
        return columns_N.where(mine_N, targets_N.new_full((), ELSEWHERE)).where(targets_N >= 0, -1)

    def look_up(self, embedding: Any, forward: Callable[[Tensor], Tensor], part: Tensor, ids: Tensor) -> Tensor:
        """Return what an embedding's own ``forward`` makes of ids (...), (..., D): zero for those of other ranks.

        ``part`` are this rank's rows of its weight. An id outside of the vocabulary ends the process."""
        rows = ids - self.start
        mine = (rows >= 0) & (rows < len(part))
        inside = (ids >= 0) & (ids < self.vocabulary)
        torch._assert_async(inside.all(), f"input_ids must lie in [0, {self.vocabulary})")  # pyright: ignore[reportPrivateImportUsage]
        padding = embedding.padding_idx
        if padding is not None:
            padding = padding - self.start if self.start <= padding < self.start + len(part) else None
        own, embedding.padding_idx = embedding.padding_idx, padding
        try:
            found = functional_call(_LookUp(embedding, forward), {"embedding.weight": part}, (rows.where(mine, 0),))
        finally:
            embedding.padding_idx = own
        return found.masked_fill(~mine[..., None], 0)

    def refuse_own_tokens(self, what: str) -> None:
        """Raise a UserError for ``what`` works on the same tokens alone, if ranks have tokens of their own."""
        if self.tokens_differ:
            raise UserError(f"{what} needs the output layer whole on each rank; choose gather_head=true")

    def check(self, weight: Tensor) -> None:
        """Raise a UserError unless the weight's rows can be this part of the vocabulary."""
        rows, start = weight.shape[0], self.start
        if start < 0 or start + rows > self.vocabulary or rows > self.largest:
            raise UserError(
                f"{rows} rows of a weight cannot be the entries from {start} on of a vocabulary of {self.vocabulary} "
                f"of whose parts the largest has {self.largest}; give each rank's own first entry, and "
                "the largest number of rows of any"
            )


class _LookUp(nn.Module):
    """Runs an embedding's own ``forward``, in place of which it may have another one."""

    def __init__(self, embedding: nn.Module, own: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding, self.forward = embedding, own
