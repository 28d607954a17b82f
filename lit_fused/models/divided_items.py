"""A catalogue whose table is divided over the ranks of data parallelism: each has its own users, and some of the items.

No rank has the whole table, its gradient or its optimiser state. Items that a rank's users had are looked up by the
ranks that have them, and the hidden states of all ranks go to all of them: the loss is that of a divided vocabulary,
the same on every rank, and each takes its share of it, 1/R. So what all ranks compute with has the sum of R equal
gradients, and the table has the mean over ranks of its own, as FSDP makes it of all others.

R ranks, n rows of one of them, N of the one with most, D hidden.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from lit_fused.errors import UserError
from lit_fused.losses import LossOutput
from lit_fused.models.shared_table import SharedTable
from lit_fused.ops.vocabulary_parallel import VocabularyShard


class _GradientTimes(torch.autograd.Function):
    """A tensor whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Any:
        return gradient[0] * ctx.factor, None


class DividedItems:
    """Divides a table (items + 1, D), in place, by rows over a mesh of one dimension, and brings rows together. Every
    rank calls the methods at the same time."""

    def __init__(self, table: nn.Embedding, shared: SharedTable, mesh: DeviceMesh, device: torch.device) -> None:
        self.mesh, self.ranks, self.table, self.shared = mesh, mesh.size(), table, shared
        entries = len(table.weight)
        self.rows = VocabularyShard.on(mesh, entries)
        if self.rows.largest * (self.ranks - 1) >= entries:
            raise UserError(f"{entries - 1} items cannot be divided over {self.ranks} devices; use fewer of them")
        # Items begin with row 1, so the first rank has one less.
        self.shard = replace(self.rows, start=max(self.rows.start - 1, 0), vocabulary=entries - 1)
        own = table.weight.detach()[self.rows.start : self.rows.start + self.rows.largest].to(device, copy=True)
        shape, stride = table.weight.shape, (table.weight.shape[1], 1)
        parts = DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        table.weight = nn.Parameter(parts, requires_grad=table.weight.requires_grad)
        self._look_up_own, table.forward = table.forward, self._look_up
        shared.hook.remove()  # Rows of other ranks are none of this one's table.
        # The host exchanges shapes without waiting for the device.
        self._host_group = mesh.get_group()
        if device.type != "cpu":
            self._host_group = dist.new_group(dist.get_process_group_ranks(mesh.get_group()), backend="gloo")

    @property
    def weight(self) -> Tensor:
        """Return the items' rows that this rank has."""
        return self._own_rows[self._first_item :] if self.shared.items is None else self.shared.items

    @property
    def _first_item(self) -> int:
        return int(self.rows.start == 0)

    @property
    def _own_rows(self) -> Tensor:
        weight: Any = self.table.weight
        return weight.to_local()

    def part(self, vector_V: Tensor) -> Tensor:
        """Return this rank's part of numbers of each item."""
        own = vector_V[self.shard.start : self.shard.start + len(self.weight)]
        return _GradientTimes.apply(own, self.ranks)  # type: ignore[return-value]

    def scores(self, hidden_states: Tensor, bias_V: Tensor | None) -> Tensor:
        """Return the scores (..., V) of all items for hidden states (..., D) that are the same on all ranks."""
        same = DTensor.from_local(hidden_states, self.mesh, [Replicate()], run_check=False)
        scores: Any = F.linear(same, self.table.weight)
        scores = scores.full_tensor()[..., 1:]
        return scores if bias_V is None else scores + bias_V

    def shapes(self, rows: Tensor) -> Tensor:
        """Return the shapes (R, dimensions) that the rows of all ranks have, on the CPU, for which the host waits."""
        shapes = torch.empty(self.ranks, rows.ndim, dtype=torch.int64)
        dist.all_gather_into_tensor(shapes, torch.tensor([rows.shape]), group=self._host_group)
        return shapes

    def of_all(self, rows: Tensor, fill: float = 0, shapes: Tensor | None = None) -> Tensor:
        """Return the rows (n, ...) of all ranks, (R N, ...), with ``fill`` where one has less; ``shapes``: theirs, if
        they are known."""
        shapes = self.shapes(rows) if shapes is None else shapes
        missing = (shapes.amax(0) - shapes[self.mesh.get_local_rank()]).tolist()
        padded = F.pad(rows, [number for size in reversed(missing) for number in (0, size)], value=fill)
        padded = _GradientTimes.apply(padded.contiguous(), self.ranks)
        own = DTensor.from_local(padded, self.mesh, [Shard(0)], run_check=False)
        return own.redistribute(placements=[Replicate()]).to_local()

    def own(self, rows_of_all: Tensor, count: int) -> Tensor:
        """Return the ``count`` rows that this rank has of what :meth:`of_all` made."""
        start = len(rows_of_all) // self.ranks * self.mesh.get_local_rank()
        return rows_of_all[start : start + count]

    def share(self, output: LossOutput) -> LossOutput:
        """Return this rank's share of sums that all ranks have: those of all ranks together are the sums."""
        stats = {name: value.double() / self.ranks for name, value in output.stats.items()}
        count = output.num_tokens.double() / self.ranks
        return replace(output, loss_sum=output.loss_sum / self.ranks, num_tokens=count, stats=stats)

    def _look_up(self, input: Tensor) -> Tensor:
        own, ids = self._own_rows, self.of_all(input.flatten())
        found = self.rows.look_up(self.table, self._look_up_own, own, ids)
        places = (ids - self.rows.start).where(ids < self.rows.start + len(own), -1)
        joined = self.shared.join(self.table, own, found, places, self._first_item)
        found = found if joined is None else joined
        summed = DTensor.from_local(found, self.mesh, [Partial()], run_check=False).redistribute(placements=[Shard(0)])
        own = summed.to_local()[: input.numel()].view(*input.shape, -1)
        return _GradientTimes.apply(own, 1 / self.ranks)  # type: ignore[return-value]
