"""Checkpoints of a divided model: every tensor under the name that it has in the whole one.

A folder (torch.distributed.checkpoint) has a file of every rank; the optimiser's state in it is flat, by parameter
names, so that it can be read for any division into stages. A single file has what one process would have written: the
whole state_dict, and the optimiser's state by the parameters' numbers.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.load import _METADATA_FILENAME
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
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

from lit_fused.errors import UserError

_FLAT = StateDictOptions(cpu_offload=True, flatten_optimizer_state_dict=True)


def own_state(model: nn.Module) -> dict[str, Any]:
    """This rank's parameters and buffers, its shards of them under FSDP2."""
    return get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))


def own_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """This rank's optimiser state, flat, by the names of parameters."""
    return get_optimizer_state_dict(model, optimizer, options=_FLAT)


def gathered(tensors: dict[str, Any], mesh: DeviceMesh, device: torch.device) -> dict[str, Tensor]:
    """The tensors of all ranks of a pipeline, whole, in the CPU memory of global rank 0; empty elsewhere.

    One tensor after the other, so that no device holds more than its own and one more.
    """
    group, mine = mesh["pipeline_parallel"].get_group(), mesh["pipeline_parallel"].get_local_rank()
    is_sender = mesh["data_parallel"].get_local_rank() == 0  # the others have copies, or shards that it assembles
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
    """What one process's optimiser would return, on global rank 0; empty elsewhere.

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
    number = {name: index for index, name in enumerate(name for group in groups for name in group)}
    by_number: dict[int, dict[str, Tensor]] = {}
    for key, value in whole.items():
        name, _, part = key.rpartition(" ")
        by_number.setdefault(number[name], {})[part] = value
    return {
        "state": dict(sorted(by_number.items())),
        "param_groups": [
            {**group, "params": [number[name] for name in theirs]}
            for group, theirs in zip(state["param_groups"], groups, strict=True)
        ],
    }


def _groups(own: Sequence[dict[str, Any]], names: Sequence[str], group: dist.ProcessGroup) -> list[list[str]]:
    """The names in each parameter group of the whole model, in its order."""
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
    path: Path, model: nn.Module, optimizers: Sequence[Optimizer], whole: Collection[str]
) -> dict[str, Any]:
    """Load parameters and optimisers, in place, from the folder of any division. Returns the rest of it.

    Args:
        whole: the names of all entries of the whole model's state_dict.
    """
    saved = FileSystemReader(path).read_metadata().state_dict_metadata.keys()
    state = own_state(model)
    _check_names({*whole, *state}, [n.removeprefix("state_dict.") for n in saved if n.startswith("state_dict.")], path)
    load({"state_dict": state}, checkpoint_id=path)
    set_model_state_dict(model, state)
    for index, optimizer in enumerate(optimizers):
        values = own_optimizer_state(model, optimizer)
        if not any(name.startswith(f"optimizer_{index}.param_groups.") for name in saved):
            raise UserError(
                f"the optimiser's state in {path} was written by another strategy; resume under that one, or let it "
                "write one file (save_distributed_checkpoint=False), which any strategy loads"
            )
        load({f"optimizer_{index}": values}, checkpoint_id=path)
        set_optimizer_state_dict(model, optimizer, values, options=_FLAT)
    return torch.load(path / _METADATA_FILENAME, weights_only=False)


def load_file(
    path: Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    whole: Collection[str],
    names: Sequence[str],
    group: dist.ProcessGroup,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Load parameters and optimisers, in place, from the one file of any strategy. Returns the rest of it.

    Args:
        whole: the names of all entries of the whole model's state_dict.
        names: of all parameters of the whole model, in its order.
    """
    checkpoint = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
    saved = checkpoint.pop("state_dict")
    own = model.state_dict()
    _check_names({*whole, *own}, saved, path)
    differing = [name for name in own if tuple(own[name].shape) != tuple(saved[name].shape)]
    if differing:
        name = differing[0]
        raise UserError(
            f"the checkpoint {path} is of another model: {name} is {tuple(saved[name].shape)} there and "
            f"{tuple(own[name].shape)} here; use the model configuration that it was trained with"
        )
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, {name: saved[name] for name in own}, options=options)
    states = checkpoint.pop("optimizer_states", [])
    for optimizer, state in zip(optimizers, states, strict=False):
        ours: Any = get_optimizer_state_dict(model, optimizer)["param_groups"]
        groups = _groups(ours, names, group)
        theirs = state["param_groups"]
        if [len(part) for part in groups] != [len(part["params"]) for part in theirs]:
            raise UserError(
                f"the optimiser in {path} has {[len(part['params']) for part in theirs]} parameters in its groups, "
                f"this one {[len(part) for part in groups]}; use the optimiser that it was trained with"
            )
        number = dict(
            pair
            for part, names_of_part in zip(theirs, groups, strict=True)
            for pair in zip(names_of_part, part["params"], strict=True)
        )
        mine = [name for part in ours for name in part["params"]]
        set_optimizer_state_dict(
            model,
            optimizer,
            {
                "state": {name: state["state"][number[name]] for name in mine if number[name] in state["state"]},
                "param_groups": [{**their, "params": our["params"]} for their, our in zip(theirs, ours, strict=True)],
            },
            options=options,
        )
    return checkpoint


def _check_names(whole: Collection[str], saved: Collection[str], path: Path) -> None:
    here, there = sorted(set(whole) - set(saved)), sorted(set(saved) - set(whole))
    if here or there:
        shown = "; ".join([f"{n}: only here" for n in here[:2]] + [f"{n}: only in the checkpoint" for n in there[:2]])
        raise UserError(
            f"the checkpoint {path} is of another model: {len(here) + len(there)} of {len(set(whole) | set(saved))} "
            f"parameters differ ({shown}); use the model configuration that it was trained with"
        )
