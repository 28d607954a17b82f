"""``ReplicatedStrategy``: a copy of the model on every device, whose gradients are averaged where they lie.

torch's ``DistributedDataParallel`` copies each gradient into a bucket and exchanges that. Here groups of neighbouring
gradients are exchanged in place while backward goes on, which takes no copies and no memory for them. A parameter may
have its gradient on some ranks alone, or on none.
"""

from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout

from lit_fused.errors import UserError
from lit_fused.parallel.collectives import objects_of_ranks, on_device, send_weights

_GROUP_BYTES = 100 * 2**20  # Larger groups take no less time on GPUs with NVLink, and smaller ones more launches.


class _Exchange:
    """Averages the gradients of a model's parameters over all ranks: in groups, each when backward has its gradients.

    Every rank exchanges the same groups in the same order. Numbers of a missing gradient are exchanged as zeros.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.is_due = False  # Lightning has begun a backward whose gradients are to be averaged.
        self.is_blocked = False  # More micro-batches of the same step follow.
        self._device = device
        self._ranks: Any = dist.group.WORLD
        self._parameters = [*model.parameters()]
        self._buffers = [buffer.detach() for buffer in model.buffers()]
        tables = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
        self._sparse = {table.weight for table in tables}
        self._hooks: dict[Tensor, Any] = {}
        self._trained: list[bool] = []
        self._task: int | None = None  # the backward that the rest is of, by torch's number; None when it is done
        self._works: list[Any] = []
        self._group()

    def _group(self) -> None:
        """Group the parameters that are trained now, the last one first, as backward comes to them."""
        trained = [p.requires_grad for p in self._parameters]
        if trained == self._trained:
            return
        self._trained = trained
        self._groups: list[list[Tensor]] = [[]]
        size = 0
        for parameter in reversed([p for p in self._parameters if p.requires_grad]):
            if parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._arrived)
            if self._groups[-1] and size + parameter.nbytes > _GROUP_BYTES:
                self._groups.append([])
                size = 0
            self._groups[-1].append(parameter)
            size += parameter.nbytes
        self._group_of = {p: index for index, group in enumerate(self._groups) for p in group}
        self._all_there = torch.ones(len(self._group_of), device=self._device)

    def remove(self) -> None:
        for hook in self._hooks.values():
            hook.remove()

    def _begin(self, task: int) -> None:
        self._wait()  # for what an error, or the backward around this one, has left
        self._group()
        self._task, self._next = task, 0
        self._missing = [len(group) for group in self._groups]
        self._zeros: list[Tensor] = []  # parameters whose gradient no backward of this rank has made

    def _arrived(self, parameter: Tensor) -> None:
        if self.is_blocked:
            return
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._begin(task)
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        if parameter in self._group_of:
            self._missing[self._group_of[parameter]] -= 1
        while self._next < len(self._groups) and not self._missing[self._next]:
            self._send_group()

    @torch.no_grad()
    def _send_group(self) -> None:
        gradients: list[Tensor] = []
        for parameter in self._groups[self._next]:
            if parameter.grad is None:
                self._zeros.append(parameter)
                zeros = torch.zeros_like(parameter)
                parameter.grad = zeros.to_sparse(1) if parameter in self._sparse else zeros
            gradients.append(parameter.grad)
        self._next += 1
        self._send(gradients, is_mean=True)

    def _send(self, tensors: list[Tensor], *, is_mean: bool) -> None:
        averages = is_mean and dist.get_backend() == "nccl"
        if is_mean and not averages:  # Sums first might be too large for float16.
            for tensor in tensors:
                tensor.div_(dist.get_world_size())
        operation = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp, options.asyncOp = dist.ReduceOp(operation), True
        alike: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            if tensor.is_sparse:
                self._works.append(dist.all_reduce(tensor, operation, async_op=True))
            else:
                parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                alike[parts.dtype].append(parts)
        for together in alike.values():
            self._works.append(self._ranks.allreduce_coalesced(together, options))

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []

    @torch.no_grad()
    def finish(self) -> None:
        """Exchange the gradients that are not on their way, and let the device wait for all of them."""
        if self._task is None:  # A backward within this one has begun again, and has ended.
            return
        while self._next < len(self._groups):
            self._send_group()
        zeros = {id(p) for p in self._zeros}
        parameters = [*self._group_of]
        there = self._all_there.clone()
        if zeros:
            there = on_device(torch.tensor([float(id(p) not in zeros) for p in parameters]), self._device)
        self._send([there], is_mean=False)
        self._wait()
        if zeros:  # This rank waits for the device; those that have all gradients do not.
            for parameter, ranks in zip(parameters, there.tolist(), strict=True):
                if not ranks:
                    parameter.grad = None
        if self._buffers:  # torch's DDP sends them before the next forward.
            dist._broadcast_coalesced(  # pyright: ignore[reportPrivateImportUsage]
                self._ranks, self._buffers, _GROUP_BYTES, 0
            )
        self._task, self.is_due = None, False

    def finish_due(self) -> None:
        """Take part in the exchange after a backward that came to no parameter, as other ranks wait for this one."""
        if self.is_due:
            self._begin(-1)
            self.finish()


class ReplicatedStrategy(DDPStrategy):
    """Lightning's ``DDPStrategy`` without torch's ``DistributedDataParallel``: gradients are averaged where they lie.

    A parameter that no rank's loss came to has no gradient, as on one device, and one that some ranks' losses came to
    has its mean over all of them. After each step all ranks have the first one's buffers.

    Args:
        process_group_backend, timeout: as Lightning's.

    Raises:
        UserError: in the trainer, if the ranks have different parameters.
    """

    _exchange: _Exchange | None = None

    def __init__(
        self, process_group_backend: str | None = None, timeout: timedelta | None = default_pg_timeout
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)

    def configure_ddp(self) -> None:
        assert self.model is not None
        own = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in self.model.named_parameters()]
        first, *others = objects_of_ranks(own)
        for rank, other in enumerate(others, 1):
            if other != first:
                names = sorted({entry[0] for entry in {*first} ^ {*other}})
                raise UserError(
                    f"rank {rank} has other parameters than rank 0, or trains others ("
                    f"{', '.join(names[:3])}{', ...' * (len(names) > 3)}); build the same model on every rank"
                )
        send_weights(self.model, self.root_device)
        self._stop_exchange()
        self._exchange = _Exchange(self.model, self.root_device)

    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._exchange is not None:
            self._exchange.is_due = not self._exchange.is_blocked

    def post_backward(self, closure_loss: Tensor) -> None:
        self.finish_exchange()

    def finish_exchange(self) -> None:
        """Average this rank's gradients with those of the others, unless its backward has."""
        if self._exchange is not None:
            self._exchange.finish_due()

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        # Lightning enters it for the backward of every micro-batch but the last of an optimiser step.
        assert self._exchange is not None
        self._exchange.is_blocked = True
        try:
            yield
        finally:
            self._exchange.is_blocked = False

    def _stop_exchange(self) -> None:
        if self._exchange is not None:
            self._exchange.remove()
            self._exchange = None

    def teardown(self) -> None:
        self._stop_exchange()
        super().teardown()
