"""FSDP2 and tensor parallelism: Lightning's strategy, whose checkpoints move to any other."""

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from lit_fused.errors import UserError, checked_options
from lit_fused.parallel.checkpoint import FolderCheckpoints
from lit_fused.strategy_names import register

register()


class FSDP2Strategy(FolderCheckpoints):
    """Lightning's ``ModelParallelStrategy``, FSDP2 and tensor parallelism, with checkpoints that move.

    Groups of neighbouring devices divide each matrix of the model; over these groups, which train on different data,
    parameters, gradients and optimiser state are sharded.

    Args:
        data_parallel_size: number of groups; None is as many as the devices make.
        tensor_parallel_size: devices of a group; 1 divides no matrix, None is as many as there are for each group.
        process_group_backend, timeout: as Lightning's.
        reduce_every_micro_batch: reduce and shard gradients after each accumulated micro-batch. False does it once per
            optimiser step, with that many times less communication and a whole gradient of the model on each rank.
        reshard_after_forward: free a layer's gathered parameters after its forward, and gather them again for its
            backward. False keeps them until then: a third less communication, and all parameters whole on each rank.
            None is False on GPUs of whose memory the parameters are little, at most a fortieth.
        mixed_precision_policy: with ``precision="bf16-mixed"``, gather the parameters as bfloat16 copies, in which
            layers, norms and the residual stream compute, and sum gradients over devices in float32. False gathers them
            in float32, and autocast alone rounds what a matrix product takes, as on one device.
        gather_head: gather the output layer's weight for the loss, whole on each rank. False leaves each rank its rows,
            for which it computes the logits of the tokens of all ranks; a tied embedding is not gathered either.

    Raises:
        UserError: in the trainer, if its devices cannot be grouped so, or with a policy and another precision.
    """

    groups = "tensor_parallel"  # what the devices of a group share

    @checked_options(data_parallel_size=1, tensor_parallel_size=0)
    def __init__(
        self,
        data_parallel_size: int | None = None,
        tensor_parallel_size: int | None = 1,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        *,
        reduce_every_micro_batch: bool = True,
        reshard_after_forward: bool | None = None,
        mixed_precision_policy: bool = False,
        gather_head: bool = True,
    ) -> None:
        super().__init__("auto", "auto", True, process_group_backend, timeout)
        self.sizes: Any = data_parallel_size, tensor_parallel_size
        self.reduce_every_micro_batch = reduce_every_micro_batch
        self.reshard_after_forward = reshard_after_forward
        self.mixed_precision_policy = mixed_precision_policy
        self.gather_head = gather_head

    def set_world_ranks(self) -> None:
        # The strategy knows its devices by now, and no process has been started yet.
        self.sizes = self.sizes_on(self.num_nodes * self.num_processes)
        super().set_world_ranks()

    def sizes_on(self, devices: int) -> tuple[int, int]:
        """Return the number of groups and the size of each; UserError if the devices cannot be grouped so."""
        groups, size = self.sizes
        if size is None:
            size = max(devices // (groups or 1), 1)
        if size < 1 or devices % size or (groups is not None and groups * size != devices):
            wanted = f"data_parallel_size={groups} times " if groups is not None else ""
            raise UserError(
                f"{devices} devices cannot be grouped by {wanted}{self.groups}_size={size}; choose trainer.devices "
                f"(times trainer.num_nodes), or trainer.strategy.{self.groups}_size, so that they fit"
            )
        return devices // size, size

    def setup_environment(self) -> None:
        super().setup_environment()
        names = ("data_parallel", self.groups)
        self.mesh = init_device_mesh(self.root_device.type, self.sizes, mesh_dim_names=names)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        # Lightning enters it for the backward of every micro-batch but the last of an optimiser step.
        assert self.model is not None
        units = [] if self.reduce_every_micro_batch else [m for m in self.model.modules() if isinstance(m, FSDPModule)]
        for unit in units:
            unit.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for unit in units:
                unit.set_requires_gradient_sync(True, recurse=False)
