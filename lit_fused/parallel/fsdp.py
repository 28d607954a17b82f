"""Fully sharded data parallelism, both generations: which modules are units, and how the loss finds the weight whole.

A unit's parameters are gathered for its forward and backward. Every repeated block is a unit; what is left, the input
embedding and the output layer, tied or not, belongs to the root, and the root's forward ends with the loss. So the loss
reads a plain, whole weight at call time, and its gradient is averaged over the ranks and sharded like any other.

FSDP2 (``ModelParallelStrategy``) has the :class:`LanguageModel` as its root, FSDP1 (``FSDPStrategy``) the whole module.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.strategies import FSDPStrategy, Strategy
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from lit_fused.errors import UserError
from lit_fused.model import LanguageModel

# methods of the model that run it, too
_BESIDE_FORWARD = ("prepare", "check_parity", "check_packing", "token_losses", "generate")


def shard(model: LanguageModel, mesh: DeviceMesh) -> None:
    """FSDP2 in place, over the ranks of ``mesh``; a model that is sharded already stays as it is."""
    if isinstance(model, FSDPModule):
        return
    for block in blocks(model.backbone):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for method in _BESIDE_FORWARD:
        register_fsdp_forward_method(model, method)


def reshard(model: nn.Module) -> None:
    """Free what a forward pass outside of training has left gathered: the root's own parameters."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: transformers' layers, or what the outermost module lists of another one hold."""
    layers: list[nn.Module] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return layers or _in_module_lists(model)


def _in_module_lists(model: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else _in_module_lists(child)
    return found


def block_wrap_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """FSDP1's ``auto_wrap_policy``: every layer of a transformers model is a unit."""
    return recurse or isinstance(module, GradientCheckpointingLayer)


def check_units(root: nn.Module, output_layer: nn.Module) -> None:
    """Refuse FSDP1 units that have gathered and freed the output layer's weight before the loss reads it.

    Raises:
        UserError: the output layer, or a layer whose weight it shares, is a unit or inside one.
    """
    weight = getattr(output_layer, "weight", None)
    for unit in FullyShardedDataParallel.fsdp_modules(root):
        inside = unit is not root and any(
            m is output_layer or getattr(m, "weight", 0) is weight for m in unit.modules()
        )
        if inside:
            raise UserError(
                f"FSDP's auto_wrap_policy has made a unit of {type(unit.module).__name__}, to which the output layer's "
                "weight belongs; the loss, which runs in the root, needs it there. Wrap the model's layers alone: "
                "auto_wrap_policy=lit_fused.parallel.block_wrap_policy"
            )


@contextmanager
def whole_parameters(strategy: Strategy | None) -> Iterator[None]:
    """Within the block FSDP1's parameters are whole on every rank, to be read; all ranks have to enter it. Elsewhere,
    nothing.

    No unit may run in it: where it computes in another precision than it keeps, FSDP1 forgets to free the whole copy
    then, and reads that, long outdated, whenever it is asked for whole parameters again: in every checkpoint.
    """
    with _summoned(strategy, recurse=True):
        yield


@contextmanager
def runs_outside_of_the_root(strategy: Strategy | None) -> Iterator[None]:
    """Within the block the model inside of FSDP1's root can run: the root's own parameters are whole, the other units
    gather theirs as always. All ranks have to enter it. Elsewhere, nothing."""
    with _summoned(strategy, recurse=False):
        yield


@contextmanager
def _summoned(strategy: Strategy | None, *, recurse: bool) -> Iterator[None]:
    if isinstance(strategy, FSDPStrategy) and isinstance(strategy.model, FullyShardedDataParallel):
        summoned = FullyShardedDataParallel.summon_full_params(strategy.model, recurse=recurse, writeback=False)
        with summoned, strategy.precision_plugin.forward_context():
            yield
    else:
        yield


def whole_state_dict(model: nn.Module) -> Mapping[str, Any] | None:
    """Parameters that FSDP2 or tensor parallelism distributes, whole, on the CPU of rank 0 (empty elsewhere); None for
    a model that is on every rank.

    Every rank has to call it.
    """
    if not any(isinstance(p, DTensor) for p in model.parameters()):
        return None
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    names: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):  # gathered twice where layers share it
        first = names.setdefault(id(p), name)
        if first in weights:
            weights[name] = weights[first]
    return weights
