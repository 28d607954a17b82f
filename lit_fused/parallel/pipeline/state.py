"""Save and load the state of a divided model: every tensor has the name that it has in the whole model.

A folder (torch.distributed.checkpoint) has a file of every rank; its optimiser state is flat, so that any division into
stages can read it. A single file has the whole state, gathered on rank 0 tensor by tensor. :mod:`lit_fused.checkpoints`
reads both, and a divided model loads what any other strategy has written.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.load import _METADATA_FILENAME
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_fused.checkpoints.agreement import check_same_model, check_same_trained, shapes_of
from lit_fused.checkpoints.optimizer_state import named_optimizer_state, numbered_optimizer_state, parameter_names
from lit_fused.checkpoints.reading import flattened, read_metadata, shapes_in, trained_in
from lit_fused.errors import UserError

_FLAT = StateDictOptions(cpu_offload=True, flatten_optimizer_state_dict=True)


def own_state(model: nn.Module) -> dict[str, Any]:
    """Return this rank's parameters and buffers, or its shards of them under FSDP2."""
    return get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))


def own_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return this rank's optimiser state, flat, by the names of parameters."""
    return get_optimizer_state_dict(model, optimizer, options=_FLAT)


def gathered(tensors: dict[str, Any], mesh: DeviceMesh, device: torch.device) -> dict[str, Tensor]:
    """Return the tensors of all ranks of a pipeline, whole, in the CPU memory of global rank 0; empty elsewhere.

    Tensors are sent one after the other, so that a device needs memory for one more than its own.
    """
    group, mine = mesh["pipeline_parallel"].get_group(), mesh["pipeline_parallel"].get_local_rank()
    is_sender = mesh["data_parallel"].get_local_rank() == 0  # Other pipelines have copies or shards of its tensors.
    own = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
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
    groups = _groups(state["param_groups"], names, mesh["pipeline_parallel"].get_group())
    if not whole:
        return {}
    by_name: dict[str, dict[str, Tensor]] = {name: {} for group in groups for name in group}
    for key, value in whole.items():
        name, _, part = key.rpartition(" ")
        by_name[name][part] = value
    settings = zip(state["param_groups"], groups, strict=True)
    return {"state": by_name, "param_groups": [{**group, "params": theirs} for group, theirs in settings]}


def _groups(own: Sequence[dict[str, Any]], names: Sequence[str], group: dist.ProcessGroup) -> list[list[str]]:
    """Return the names in each parameter group of the whole model, in its order."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, [part["params"] for part in own], group=group)
    if len({len(parts) for parts in everyone}) > 1:
        raise UserError(
            "the optimiser has another number of parameter groups on each stage; save checkpoints with "
            "save_distributed_checkpoint=True"
        )
    merged = [set().union(*parts) for parts in zip(*everyone, strict=True)]
    return [[name for name in names if name in part] for part in merged]


def load_folder(
    path: Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    shapes: Mapping[str, tuple[int, ...]],
    weights_only: bool | None,
) -> dict[str, Any]:
    """Load parameters and optimisers, in place, from the folder of any strategy, and return the rest of it.

    Args:
        shapes: of all entries of the whole model's state_dict.
    """
    metadata, key = read_metadata(path)
    check_same_model(shapes_in(metadata, key), shapes)
    weights = own_state(model)
    load({key: weights}, checkpoint_id=path)
    set_model_state_dict(model, weights)
    options = _FLAT if flattened(metadata) else StateDictOptions(cpu_offload=True)
    for index, optimizer in enumerate(optimizers):
        values: Any = get_optimizer_state_dict(model, optimizer, options=options)
        groups = [list(group["params"]) for group in values.get("param_groups", [])]
        missing = _names_of(model, optimizer) - trained_in(metadata, index)
        if missing:
            check_same_trained(set(), missing)
        state = {f"optimizer_{index}": values}
        load(state, checkpoint_id=path)
        values = state[f"optimizer_{index}"]
        for group, own in zip(values.get("param_groups", []), groups, strict=True):
            group["params"] = own  # the folder's has those of all stages
        set_optimizer_state_dict(model, optimizer, values, options=options)
    return torch.load(path / _METADATA_FILENAME, map_location="cpu", weights_only=weights_only)


def load_file(
    path: Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    shapes: Mapping[str, tuple[int, ...]],
    names: Sequence[str],
    group: dist.ProcessGroup,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Load parameters and optimisers, in place, from the one file of any strategy, and return the rest of it.

    Args:
        shapes: of all entries of the whole model's state_dict.
        names: of all parameters of the whole model, in its order.
    """
    checkpoint = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
    saved = checkpoint.pop("state_dict")
    check_same_model(shapes_of(saved), shapes)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, {name: saved[name] for name in model.state_dict()}, options=options)
    for optimizer, state in zip(optimizers, checkpoint.pop("optimizer_states", []), strict=False):
        theirs = {name for part in state["param_groups"] for name in part["params"]}
        if any(isinstance(name, int) for name in theirs):
            raise UserError(
                "the checkpoint numbers the parameters of its optimiser's state (it was written by plain Lightning or "
                "an earlier version), and a pipeline has only some of them on each device; resume it once with "
                "strategy=auto or ddp and save: checkpoints of this version have names and load anywhere"
            )
        ours: Any = get_optimizer_state_dict(model, optimizer)["param_groups"]
        check_same_trained(theirs, {name for part in _groups(ours, names, group) for name in part})
        mine = [list(part["params"]) for part in ours]
        flat = [name for part in mine for name in part]
        parts = [
            {**part, "params": [name for name in part["params"] if name in flat]} for part in state["param_groups"]
        ]
        own = {"state": {n: v for n, v in state["state"].items() if n in flat}, "param_groups": parts}
        own = named_optimizer_state(numbered_optimizer_state(own, mine), flat)  # in the groups that this one has
        set_optimizer_state_dict(model, optimizer, own, options=options)
    return checkpoint


def _names_of(model: nn.Module, optimizer: Optimizer) -> set[str]:
    names = parameter_names(model)
    return {names[id(p)] for group in optimizer.param_groups for p in group["params"]}
