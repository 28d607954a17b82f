"""Lightning's two sharded strategies, with checkpoints that move to any other strategy and appear whole or not at all.

Both load folders that either of them wrote, with any number of ranks: torch reads the parts that this rank needs. They
save beside the previous checkpoint and then rename. FSDP2's also groups whatever devices the trainer has.
"""

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lit_fused.checkpoints.agreement import check_has_optimizers, check_same_model, check_same_trained, shapes_of
from lit_fused.checkpoints.optimizer_state import check_numbers, parameter_names
from lit_fused.checkpoints.reading import flattened, optimizers_in, read_metadata, shapes_in, trained_in
from lit_fused.checkpoints.whole_or_not import checkpoint_fault, partial_path, put_in_place, remove
from lit_fused.errors import UserError

TIMEOUT = timedelta(minutes=30)  # Lightning's


class MovableCheckpoints(ParallelStrategy):
    """Saves and loads checkpoints that move to other strategies; a base class to put before a sharded strategy."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        path = Path(self.broadcast(filepath))
        partial = partial_path(path)
        if self.is_global_zero:
            remove(partial)
        self.barrier()
        super().save_checkpoint(checkpoint, partial, storage_options)
        self.barrier()
        if self.is_global_zero:
            put_in_place(partial, path)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        fault = checkpoint_fault(path)
        if fault:
            raise UserError(fault)
        if path.is_dir():
            return self._load_folder(path, weights_only)
        assert self.model is not None
        saved = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
        check_same_model(shapes_of(saved["state_dict"]), shapes_of(get_model_state_dict(self.model)))
        optimizers = self._fitted_optimizers
        check_has_optimizers(not optimizers or "optimizer_states" in saved, path)
        check_numbers(saved.get("optimizer_states", []), optimizers, self.model)
        return super().load_checkpoint(path, weights_only)

    def _load_folder(self, folder: Path, weights_only: bool | None) -> dict[str, Any]:
        assert self.model is not None
        metadata, key = read_metadata(folder)
        weights = get_model_state_dict(self.model)
        check_same_model(shapes_in(metadata, key), shapes_of(weights))
        check_has_optimizers(not self._fitted_optimizers or bool(optimizers_in(metadata)), folder)
        load({key: weights}, checkpoint_id=folder)
        set_model_state_dict(self.model, weights)
        options = StateDictOptions(flatten_optimizer_state_dict=flattened(metadata))
        names = parameter_names(self.model)
        for index, optimizer in enumerate(self._fitted_optimizers):
            trained = {names[id(p)] for group in optimizer.param_groups for p in group["params"]}
            if trained_in(metadata, index):
                check_same_trained(trained_in(metadata, index), trained)
            state = {f"optimizer_{index}": get_optimizer_state_dict(self.model, optimizer, options=options)}
            load(state, checkpoint_id=folder)
            set_optimizer_state_dict(self.model, optimizer, state[f"optimizer_{index}"], options=options)
        return torch.load(folder / "meta.pt", map_location="cpu", weights_only=weights_only)

    @property
    def _fitted_optimizers(self) -> list[Optimizer]:
        """The optimisers whose states are to be loaded: all in a fit, none otherwise."""
        assert self.lightning_module is not None
        return self.optimizers if self.lightning_module.trainer.state.fn == TrainerFn.FITTING else []


class FSDP1Strategy(MovableCheckpoints, FSDPStrategy):
    """Lightning's ``FSDPStrategy``, with checkpoints that move."""


class FSDP2Strategy(MovableCheckpoints, ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy``, FSDP2 and tensor parallelism, with checkpoints that move.

    Groups of neighbouring devices divide each matrix of the model; over these groups, which train on different data,
    parameters, gradients and optimiser state are sharded.

    Args:
        data_parallel_size: number of groups; None is as many as the devices make.
        tensor_parallel_size: devices of a group; 1 divides no matrix.
        save_distributed_checkpoint, process_group_backend, timeout: as Lightning's.
        reduce_every_micro_batch: reduce and shard gradients after each accumulated micro-batch. False does it once per
            optimiser step, with that many times less communication and a whole gradient of the model on each rank.

    Raises:
        UserError: in the trainer, if its devices cannot be grouped so.
    """

    def __init__(
        self,
        data_parallel_size: int | None = None,
        tensor_parallel_size: int = 1,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = TIMEOUT,
        *,
        reduce_every_micro_batch: bool = True,
    ) -> None:
        super().__init__(
            data_parallel_size or "auto",
            tensor_parallel_size,
            save_distributed_checkpoint,
            process_group_backend,
            timeout,
        )
        self.sizes = data_parallel_size, tensor_parallel_size
        self.reduce_every_micro_batch = reduce_every_micro_batch

    def _configure_launcher(self) -> None:
        # The strategy knows its devices by now, and no process has been started yet.
        groups, size = self.sizes
        world = self.num_nodes * self.num_processes
        if size < 1 or world % size or (groups is not None and groups * size != world):
            wanted = f"data_parallel_size={groups} times " if groups is not None else ""
            raise UserError(
                f"{self.num_nodes} x {self.num_processes} devices cannot be grouped by {wanted}"
                f"tensor_parallel_size={size}; choose trainer.devices (times trainer.num_nodes), or "
                "trainer.strategy.tensor_parallel_size, so that they fit"
            )
        self._data_parallel_size = world // size
        super()._configure_launcher()

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
