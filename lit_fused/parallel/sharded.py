"""The second generation of fully sharded data parallelism and tensor parallelism (``ModelParallelStrategy``).

The :class:`LanguageModel` is FSDP2's root. Every repeated block is a unit, whose parameters are gathered for its
forward and backward; the input embedding and the output layer belong to the root, whose forward ends with the loss. So
the loss reads a whole weight at call time, and its gradient is averaged over the ranks and sharded like any other.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from lit_fused.errors import UserError
from lit_fused.losses.loss import Batch
from lit_fused.models.blocks import blocks
from lit_fused.models.language_model import LanguageModel
from lit_fused.parallel.copies import check_same_batch
from lit_fused.parallel.placement import Placement
from lit_fused.parallel.tensor import check_copied_numbers, divide
from lit_fused.parallel.tensor_plan import check_plan, is_distributed, same_random_numbers

# Methods of the model that run it, too.
_BESIDE_FORWARD = ("prepare", "check_parity", "check_packing", "token_losses", "generate")


class Sharded(Placement):
    """FSDP2 over ``mesh["data_parallel"]``, tensor parallelism over ``mesh["tensor_parallel"]``, or both."""

    is_sharded = True

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks, by their coordinates."""
        return self.strategy.device_mesh

    @property
    def tensor_mesh(self) -> DeviceMesh | None:
        """The ranks that compute every token together; None where each rank computes its own."""
        names = self.mesh.mesh_dim_names or ()
        if "tensor_parallel" not in names or self.mesh["tensor_parallel"].size() == 1:
            return None
        return self.mesh["tensor_parallel"]

    @property
    def data_parallel_size(self) -> int:
        return self.mesh["data_parallel"].size()

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        return self.mesh["data_parallel"].get_group()

    def check(self, model: LanguageModel, *, training: bool, compile: str, kernels: str) -> None:
        ranks = self.tensor_mesh
        if ranks is not None:
            check_never_compared(compile, kernels)
        elif compile == "whole":
            raise UserError(
                "compile=whole would be cut at every layer, where FSDP2 gathers its parameters; choose compile=regional"
            )
        super().check(model, training=training, compile=compile, kernels=kernels)
        if ranks is not None:
            check_plan(model, ranks.size(), training=training)

    def _divide(self, model: LanguageModel) -> None:
        tensor, data = self.tensor_mesh, self.mesh["data_parallel"]
        if tensor is not None and not is_distributed(model):
            divide(model, tensor, self.strategy.root_device)
        if data.size() > 1 or tensor is None:
            shard(model, data)

    def _compare_ranks(self, model: LanguageModel) -> None:
        check_copied_numbers(model, self.mesh)

    def check_batch(self, model: LanguageModel, batch: Batch, index: int) -> None:
        if index == 0 and self.tensor_mesh is not None:
            check_same_batch(batch, self.tensor_mesh.get_group(), "ranks of one tensor-parallel group")

    def generating(self, device: torch.device) -> AbstractContextManager[Any]:
        return nullcontext() if self.tensor_mesh is None else same_random_numbers(self.tensor_mesh, device)


def shard(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Shard a model in place over the ranks of ``mesh`` (FSDP2); one that is sharded already stays as it is."""
    if isinstance(model, FSDPModule):
        return
    for block in blocks(model.backbone):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for method in _BESIDE_FORWARD:
        register_fsdp_forward_method(model, method)


def check_never_compared(compile: str, kernels: str) -> None:
    """Refuse how a model's layers are executed, under strategies for which that was never compared.

    Raises:
        UserError: one of the two is not "none".
    """
    under = "never compared under tensor parallelism or a pipeline"
    if compile != "none":
        raise UserError(f"compile={compile} was {under}; choose compile=none, or strategy=ddp or fsdp2")
    if kernels != "none":
        raise UserError(f"kernels={kernels} were {under}; choose kernels=none, or strategy=ddp or fsdp2")
