"""Lightning's sharded strategy, with checkpoints that move to any other strategy and appear whole or not at all.

It loads folders that any number of ranks wrote: torch reads the parts that this rank needs.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint import state_dict as distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lit_fused.checkpoints import reading
from lit_fused.checkpoints.form import Weight, check_count, weights_in
from lit_fused.checkpoints.resuming import check_moments, numbering, own_part
from lit_fused.checkpoints.whole_or_not import METADATA, check_whole, written_whole
from lit_fused.errors import UserError, checked_options

_WHOLE = StateDictOptions(full_state_dict=True)


class MovableCheckpoints(ParallelStrategy):
    """Saves and loads checkpoints that move to other strategies; a base class to put before a sharded strategy."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        path = Path(self.broadcast(filepath))
        with written_whole(path, is_first=self.is_global_zero, wait=self.barrier) as partial:
            super().save_checkpoint(checkpoint, partial, storage_options)
            if self.is_global_zero and (partial / METADATA).is_file():
                reading.write_checksum(partial)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.model is not None
        assert self.lightning_module is not None
        path = Path(self.broadcast(checkpoint_path))
        check_whole(path)
        optimizers = self.optimizers if self.lightning_module.trainer.state.fn == TrainerFn.FITTING else []
        if path.is_dir():
            folder = reading.CheckpointFolder(path)
            reading.check_same_model(folder.stored_weights(), self._whole_weights())
            reading.check_resumable(path, not optimizers or bool(folder.optimizers))
            weights = get_model_state_dict(self.model)
            folder.load({"state_dict": weights})
            set_model_state_dict(self.model, weights)
            check_count("its optimisers", len(folder.optimizers), len(optimizers or folder.optimizers))
            for index, optimizer in enumerate(optimizers):
                self._load_optimizer(optimizer, f"optimizer_{index}", folder)
            return reading.read_rest(path, weights_only)
        saved = reading.read_file(path, mmap=True, weights_only=weights_only)
        weights = saved.pop("state_dict")
        reading.check_same_model(weights_in(weights), self._whole_weights())
        reading.check_resumable(path, not optimizers or "optimizer_states" in saved)
        states = saved.pop("optimizer_states", [])
        check_count("optimizer_states", len(states), len(optimizers or states))
        check_moments(saved, states, optimizers)
        own = {name: weights[name] for name in get_model_state_dict(self.model)}
        set_model_state_dict(self.model, own, options=_WHOLE)
        for optimizer, state in zip(optimizers, states, strict=False):
            trained = {name for part in state["param_groups"] for name in part["params"]}
            reading.check_same_trained(trained, self._trained(optimizer))
            own = own_part(state, self.model, optimizer)
            distributed.set_optimizer_state_dict(self.model, optimizer, own, options=_WHOLE)
        return saved

    def _load_optimizer(self, optimizer: Optimizer, key: str, folder: reading.CheckpointFolder) -> None:
        assert self.model is not None
        if trained := folder.trained(key):
            reading.check_same_trained(trained, self._trained(optimizer))
        options = StateDictOptions(flatten_optimizer_state_dict=folder.is_flat())
        state: Any = {key: distributed.get_optimizer_state_dict(self.model, optimizer, options=options)}
        own = [list(group["params"]) for group in state[key].get("param_groups", [])]
        folder.load(state)
        for group, names in zip(state[key].get("param_groups", []), own, strict=True):
            group["params"] = names  # The folder's has those of all stages of a pipeline.
        distributed.set_optimizer_state_dict(self.model, optimizer, state[key], options=options)

    def _whole_weights(self) -> Mapping[str, Weight]:
        """Return shape and kind of all entries of the whole model's state_dict."""
        assert self.model is not None
        return weights_in(get_model_state_dict(self.model))

    def _trained(self, optimizer: Optimizer) -> set[str]:
        """Return the names of the parameters of the whole model that an optimiser trains."""
        assert self.model is not None
        return set(numbering(self.model, optimizer))


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
        reshard_after_forward: free a layer's gathered parameters after its forward, and gather them again for its
            backward. False keeps them until then: a third less communication, and all parameters whole on each rank.
            None is False on GPUs of whose memory the parameters are little, at most a fortieth.

    Raises:
        UserError: in the trainer, if its devices cannot be grouped so.
    """

    @checked_options(data_parallel_size=1, tensor_parallel_size=0)
    def __init__(
        self,
        data_parallel_size: int | None = None,
        tensor_parallel_size: int = 1,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        *,
        reduce_every_micro_batch: bool = True,
        reshard_after_forward: bool | None = None,
    ) -> None:
        groups = data_parallel_size or "auto"
        super().__init__(groups, tensor_parallel_size, save_distributed_checkpoint, process_group_backend, timeout)
        self.sizes = data_parallel_size, tensor_parallel_size
        self.reduce_every_micro_batch = reduce_every_micro_batch
        self.reshard_after_forward = reshard_after_forward

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
