"""Fully sharded data parallelism (FSDP2): which modules are units, and how the loss finds the head's weight whole.

A unit's parameters are gathered for its forward and backward. Every repeated block is a unit; the root is the
:class:`LanguageModel`, whose forward ends with the loss, and to it belong what is left: the input embedding and the
output layer, tied or not. So the loss reads a plain, whole weight at call time, and its gradient is averaged over the
ranks and sharded like any other.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from lit_fused.model import LanguageModel

_BESIDE_FORWARD = ("check_parity", "token_losses")  # methods of the model that run it, too


def shard(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Shard a model in place over the ranks of ``mesh``; one that is sharded already stays as it is."""
    if isinstance(model, FSDPModule):
        return
    for block in blocks(model.backbone):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for method in _BESIDE_FORWARD:
        register_fsdp_forward_method(model, method)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: what its outermost module lists hold."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else blocks(child)
    return found
