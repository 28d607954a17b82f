"""Assemble on rank 0 what the stages of a pipeline have: every tensor has the name that it has in the whole model."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_fused.errors import UserError
from lit_fused.parallel.copies import objects_of_ranks


def gathered(tensors: dict[str, Any], mesh: DeviceMesh, device: torch.device) -> dict[str, Tensor]:
    """Return the tensors of all ranks of a pipeline, whole, in the CPU memory of global rank 0; empty elsewhere.

    Tensors are sent one after the other, so that a device needs memory for one more than its own.
    """
    group, mine = mesh["pipeline_parallel"].get_group(), mesh["pipeline_parallel"].get_local_rank()
    is_sender = mesh["data_parallel"].get_local_rank() == 0  # Other pipelines have copies or shards of its tensors.
    everyone = objects_of_ranks({name: (value.shape, value.dtype) for name, value in tensors.items()}, group)
    result: dict[str, Tensor] = {}
    for rank, theirs in enumerate(everyone):
        for name, (shape, dtype) in theirs.items():
            if rank == mine:
                value = tensors[name]
                value = value.full_tensor() if isinstance(value, DTensor) else value
                if mine == 0 and is_sender:
                    result[name] = value.detach().cpu()
                elif is_sender:
                    dist.send(value.detach().to(device).contiguous(), group=group, group_dst=0)
            elif mine == 0 and is_sender:
                buffer = torch.empty(shape, dtype=dtype, device=device)
                dist.recv(buffer, group=group, group_src=rank)
                result[name] = buffer.cpu()
    return result


def whole_optimizer_state(
    model: nn.Module, optimizer: Optimizer, names: Sequence[str], mesh: DeviceMesh, device: torch.device
) -> dict[str, Any]:
    """Return the optimiser's state of all stages, by the names of parameters, on global rank 0; empty elsewhere.

    Args:
        names: of all parameters of the whole model, in its order.
    """
    state: Any = get_optimizer_state_dict(model, optimizer)
    tensors = {
        f"{name} {key}": value if isinstance(value, Tensor) else torch.as_tensor(value)
        for name, values in state["state"].items()
        for key, value in values.items()
    }
    whole = gathered(tensors, mesh, device)
    own = [part["params"] for part in state["param_groups"]]
    groups_of_ranks = objects_of_ranks(own, mesh["pipeline_parallel"].get_group())
    if any(len(groups) != len(own) for groups in groups_of_ranks):
        raise UserError(
            "the optimiser has another number of parameter groups on each stage; save checkpoints with "
            "save_distributed_checkpoint=True"
        )
    if not whole:
        return {}
    merged = [set().union(*parts) for parts in zip(*groups_of_ranks, strict=True)]
    by_name: dict[str, dict[str, Tensor]] = {name: {} for part in merged for name in part}
    for key, value in whole.items():
        name, _, part = key.rpartition(" ")
        by_name[name][part] = value
    settings = zip(state["param_groups"], merged, strict=True)
    groups = [{**group, "params": [name for name in names if name in part]} for group, part in settings]
    return {"state": by_name, "param_groups": groups}
