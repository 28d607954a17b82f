"""``ReplicatedStrategy``: a copy of the model on every device, whose gradients are averaged where they lie.

torch's ``DistributedDataParallel`` copies each gradient into a bucket and exchanges that. Here groups of neighbouring
gradients are exchanged in place while backward goes on, which takes no copies and no memory for them. A parameter may
have its gradient on some ranks alone, or on none.
"""

from collections import Counter, defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

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
        self._model = model
        self._parameters = [*model.parameters()]
        buffers = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
        self._buffers = [(m, name, b.detach()) for m, name, b in buffers]
        tables = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
        uses = Counter[Tensor](p for m in model.modules() for p in m._parameters.values() if p is not None)
        self._sparse = {table.weight for table in tables if uses[table.weight] == 1}  # A tied one's are dense.
        # Its collectives in backward would come before a group on one rank, and after it on another.
        self._waits_for_end = any(isinstance(m, nn.SyncBatchNorm) for m in model.modules())
        self._known = {*self._parameters}
        self._hooks = [hook for p in self._parameters if (hook := self._hook(p)) is not None]
        self._trained: list[bool] = []
        self._task: int | None = None  # the backward that the rest is of, by torch's number; None when it is done
        self._is_outermost = False  # Other backward passes that come before its end run within it.
        self._works: list[Any] = []
        self._group()

    def _hook(self, parameter: Tensor) -> Any:
        """Have a parameter's gradients counted, also of one that is unfrozen later; None if it can have none."""
        is_trained = parameter.requires_grad
        if not is_trained:
            if parameter.is_inference() or not (parameter.is_floating_point() or parameter.is_complex()):
                return None
            parameter.requires_grad_(True)  # torch has hooks for such alone.
        hook = parameter.register_post_accumulate_grad_hook(self._arrived)
        parameter.requires_grad_(is_trained)
        return hook

    def _group(self) -> None:
        """Group the parameters that are trained now, the last one first, as backward comes to them."""
        trained = [p.requires_grad for p in self._parameters]
        if trained == self._trained:
            return
        self._trained = trained
        self._groups: list[list[Tensor]] = [[]]
        size = 0
        for parameter in reversed([p for p in self._parameters if p.requires_grad]):
            if self._groups[-1] and size + parameter.nbytes > _GROUP_BYTES:
                self._groups.append([])
                size = 0
            self._groups[-1].append(parameter)
            size += parameter.nbytes
        self._group_of = {p: index for index, group in enumerate(self._groups) for p in group}
        self._all_there = torch.ones(len(self._group_of), device=self._device)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def check(self, optimizer: Optimizer) -> None:
        """Refuse an optimiser of parameters whose gradients are not exchanged."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in self._known:
                    raise UserError(
                        f"an optimiser has {self._name(parameter)}, which was no parameter of the model when the "
                        "strategy was set up, and ranks would train it apart; make it in __init__ or configure_model()"
                    )

    def _name(self, parameter: Tensor) -> str:
        names = [name for name, p in self._model.named_parameters() if p is parameter]
        return names[0] if names else f"a tensor {tuple(parameter.shape)}"

    @contextmanager
    def after(self, loss: Tensor) -> Generator[None, None, None]:
        """Exchange at the end of the backward from ``loss`` that runs in this context, whatever parameters it reaches.

        Reentrant checkpointing runs others within it, and not as many on every rank.
        """
        self.is_due = not self.is_blocked
        hook = loss.register_hook(self._begin_outermost) if self.is_due and loss.requires_grad else None
        try:
            yield
            self.finish_due()
        finally:
            self._is_outermost = False
            if hook is not None:
                hook.remove()

    def _begin_outermost(self, _: Tensor) -> None:
        self._begin(torch._C._current_graph_task_id())
        self._is_outermost = True
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def _begin(self, task: int) -> None:
        self._wait()  # for what an error, or the backward around this one, has left
        self._group()
        self._task, self._next = task, 0
        self._missing = [len(group) for group in self._groups]
        self._zeros: list[Tensor] = []  # parameters whose gradient no backward of this rank has made

    def _arrived(self, parameter: Tensor) -> None:
        if self.is_blocked:
            return
        task, group = torch._C._current_graph_task_id(), self._group_of.get(parameter)
        if task != self._task and self._is_outermost:
            self._arrived_within(parameter)
            return
        if task != self._task:
            self._begin(task)
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
            group = self._group_of.get(parameter)
        if group is not None:
            self._missing[group] -= 1
        while self._next < len(self._groups) and not self._missing[self._next] and not self._waits_for_end:
            self._send_group()

    def _arrived_within(self, parameter: Tensor) -> None:
        """Leave a gradient of a backward within this one for its end: more may be added to it."""
        group = self._group_of.get(parameter)
        if group is None:
            return
        if group < self._next:
            raise UserError(
                f"{self._name(parameter)} has a gradient from reentrant checkpointing after one from without, which is "
                "being exchanged; choose use_reentrant=False"
            )
        self._missing[group] = -1  # It becomes no 0 by what arrives.

    @torch.no_grad()
    def _send_group(self) -> None:
        gradients: list[Tensor] = []
        for parameter in self._groups[self._next]:
            is_sparse = parameter in self._sparse
            if parameter.grad is None:
                self._zeros.append(parameter)
                zeros = _zeros_for(parameter)
                parameter.grad = zeros.to_sparse(1) if is_sparse else zeros
            if parameter.grad.is_sparse != is_sparse:  # All ranks send it in one form, those without one as well.
                parameter.grad = parameter.grad.to_sparse(1) if is_sparse else parameter.grad.to_dense()
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
                flat = _in_order(tensor).view(-1)  # Gloo refuses some strides, NCCL whatever is not contiguous.
                parts = torch.view_as_real(flat) if flat.is_complex() else flat
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
                self._ranks, self._shared_buffers(), _GROUP_BYTES, 0
            )
        self._task, self.is_due, self._is_outermost = None, False, False

    def _shared_buffers(self) -> list[Tensor]:
        """Return as many buffers of the same sizes on every rank, whatever a rank has put in their place.

        One outside of checkpoints that a module has replaced is its own: the angles of rotary positions for the longest
        sequence of its batches. The first one is sent for it.
        """
        found: list[Tensor] = []
        for module, name, first in self._buffers:
            now = None if name in module._non_persistent_buffers_set else module._buffers.get(name)
            kind = first.shape, first.dtype, first.device
            found.append(first if now is None or (now.shape, now.dtype, now.device) != kind else now.detach())
        return found

    def finish_due(self) -> None:
        """Take part in the exchange after a backward that came to no parameter, as other ranks wait for this one."""
        if self.is_due:
            self._begin(-1)
            self.finish()


def _in_order(tensor: Tensor) -> Tensor:
    """Return a view that is contiguous, of a tensor whose numbers lie side by side in any order of its dimensions."""
    return tensor if tensor.is_contiguous() else tensor.permute(sorted(range(tensor.dim()), key=tensor.stride)[::-1])


def _zeros_for(parameter: Tensor) -> Tensor:
    """Return zeros that lie as torch lays a parameter's gradient: in its order, or row by row if it has gaps."""
    is_dense = _in_order(parameter).is_contiguous()
    layout = torch.preserve_format if is_dense else torch.contiguous_format
    return torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype, memory_format=layout)


class ReplicatedStrategy(DDPStrategy):
    """Lightning's ``DDPStrategy`` without torch's ``DistributedDataParallel``: gradients are averaged where they lie.

    A parameter that no rank's loss came to has no gradient, as on one device, and one that some ranks' losses came to
    has its mean over all of them. After each step all ranks have the first one's buffers, except those outside of
    checkpoints that a module has replaced.

    Args:
        process_group_backend, timeout: as Lightning's.

    Raises:
        UserError: in the trainer, if the ranks have different parameters, or an optimiser has one that was made later.
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

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self._exchange is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        with self._exchange.after(closure_loss):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self._exchange is not None:
            self._exchange.check(optimizer)
        return super().optimizer_step(optimizer, *args, **kwargs)

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
