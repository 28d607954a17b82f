"""``ReplicatedStrategy``: a copy of the model on every device, whose gradients are averaged where they lie.

torch's ``DistributedDataParallel`` copies each gradient into a bucket and exchanges the bucket. Here groups of
neighbouring gradients are exchanged in place while backward goes on. On two H200, Qwen3-0.6B with compiled layers takes
171 to 173 ms a step in place of 181 to 185 (docs/evidence/devices.md).

Every rank exchanges the same groups in the same order. A rank whose loss did not come to a parameter sends zeros for
it; a parameter that no rank's loss came to keeps no gradient, as on one device.
"""

from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout

from lit_fused.errors import UserError
from lit_fused.parallel.collectives import objects_of_ranks, send_weights

GROUP_BYTES = 100 * 2**20  # Larger groups take no less time on GPUs with NVLink, smaller ones more launches.


class GradientExchange:
    """Averages the gradients of a model's parameters over all ranks, a group as soon as backward has made all of it."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.is_blocked = False  # More micro-batches of the same optimiser step follow.
        self._model, self._device = model, device
        saved = model.state_dict().keys()
        self._buffers = [name for name, _ in model.named_buffers() if name in saved]
        self._is_open = False  # A backward has begun whose gradients are not all exchanged.
        self._hooks: list[Any] = []
        self._works: list[Any] = []
        self._group([p for p in model.parameters() if p.requires_grad])

    def begin(self) -> None:
        """Prepare for a backward, at whose end :meth:`finish` has to be called on every rank."""
        if self.is_blocked or self._is_open:
            return
        trained = [p for p in self._model.parameters() if p.requires_grad]
        if {*trained} != {p for group in self._groups for p in group}:  # Some were frozen or unfrozen.
            self._group(trained)
        self._is_open, self._next = True, 0
        self._lacking: list[Tensor] = []  # They have no gradient of any micro-batch of this step on this rank.
        self._awaited = [{*group} for group in self._groups]

    def _group(self, trained: Sequence[Tensor]) -> None:
        """Group parameters from the last one to the first, as backward comes to them."""
        self.remove()
        self._groups: list[list[Tensor]] = []
        size = GROUP_BYTES
        for parameter in reversed(trained):
            if size + parameter.nbytes > GROUP_BYTES:
                self._groups, size = [*self._groups, []], 0
            self._groups[-1].append(parameter)
            size += parameter.nbytes
        self._group_of = {p: index for index, group in enumerate(self._groups) for p in group}
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in trained]

    def _arrived(self, parameter: Tensor) -> None:
        if self.is_blocked:
            return
        if not self._is_open:
            raise UserError(
                "ranks average gradients in self.manual_backward(loss); call it in place of loss.backward()"
            )
        group = self._group_of[parameter]
        if group < self._next:  # Reentrant checkpointing of a layer that is also used outside of it.
            raise UserError("a gradient was added to while it was exchanged; checkpoint with use_reentrant=False")
        self._awaited[group].discard(parameter)
        while self._next < len(self._groups) and not self._awaited[self._next]:
            self._send_group()

    @torch.no_grad()
    def _send_group(self) -> None:
        group = self._groups[self._next]
        for parameter in group:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                self._lacking.append(parameter)
        self._next += 1
        self._send([p.grad for p in group if p.grad is not None])

    def _send(self, gradients: list[Tensor]) -> None:
        operation = dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM
        if operation == dist.ReduceOp.SUM:  # The sum first might be too large for float16.
            for gradient in gradients:
                gradient.div_(dist.get_world_size())
        all_ranks: Any = dist.group.WORLD  # It is None until the strategy has started the ranks.
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp, options.asyncOp = dist.ReduceOp(operation), True
        alike: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for gradient in gradients:
            alike[gradient.dtype].append(_rows_in_order(gradient).view(-1))
        for tensors in alike.values():
            self._works.append(all_ranks.allreduce_coalesced(tensors, options))

    @torch.no_grad()
    def finish(self) -> None:
        """Exchange what is left, and let the device wait for it; nothing without :meth:`begin`."""
        if not self._is_open:
            return
        self._is_open = False
        while self._next < len(self._groups):
            self._send_group()
        place = {p: index for index, p in enumerate(self._group_of)}
        has_gradient = torch.ones(len(place), dtype=torch.int32, device=self._device)
        if self._lacking:
            has_gradient[[place[p] for p in self._lacking]] = 0
        self._works.append(dist.all_reduce(has_gradient, dist.ReduceOp.MAX, async_op=True))
        for work in self._works:
            work.wait()
        self._works = []
        if self._lacking:  # This rank waits for the device; ranks that have all gradients do not.
            for parameter, somewhere in zip(place, has_gradient.tolist(), strict=True):
                if not somewhere:
                    parameter.grad = None
        buffers = dict(self._model.named_buffers()) if self._buffers else {}
        for name in self._buffers:  # Statistics of a batch norm are those of the first rank, as under DDP.
            dist.broadcast(buffers[name], src=0)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _rows_in_order(tensor: Tensor) -> Tensor:
    """Return a contiguous view of a tensor whose numbers lie side by side in any order of its dimensions."""
    return tensor if tensor.is_contiguous() else tensor.permute(sorted(range(tensor.dim()), key=tensor.stride)[::-1])


class ReplicatedStrategy(DDPStrategy):
    """Lightning's ``DDPStrategy`` without torch's ``DistributedDataParallel``: gradients are averaged where they lie.

    Args:
        process_group_backend, timeout: as Lightning's.

    Raises:
        UserError: in the trainer, if the ranks have different parameters.
    """

    exchange: GradientExchange | None = None

    def __init__(
        self, process_group_backend: str | None = None, timeout: timedelta | None = default_pg_timeout
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)

    def configure_ddp(self) -> None:
        assert self.model is not None
        own = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in self.model.named_parameters()]
        first, *others = objects_of_ranks(own)
        for rank, other in enumerate(others, 1):
            if other != first:  # torch would wait for ever, or add up other tensors.
                raise UserError(f"rank {rank} has other parameters than rank 0; build the same model on every rank")
        send_weights(self.model, self.root_device)
        self.exchange = GradientExchange(self.model, self.root_device)

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.exchange is not None:
            self.exchange.begin()
        result = super().backward(*args, **kwargs)
        self.finish_exchange()
        return result

    def finish_exchange(self) -> None:
        """Average this rank's gradients with those of the others, unless that is done."""
        if self.exchange is not None:
            self.exchange.finish()

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        # Lightning enters it for the backward of every micro-batch but the last of an optimiser step.
        assert self.exchange is not None
        self.exchange.is_blocked = True
        try:
            yield
        finally:
            self.exchange.is_blocked = False

    def teardown(self) -> None:
        if self.exchange is not None:
            self.exchange.remove()
            self.exchange = None
        super().teardown()
