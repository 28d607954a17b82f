"""Checkpoints that move: one file or a folder, from any strategy to any other.

Strategies with whole parameters write one file; sharded ones write a folder with the parts of every rank, in the format
of torch.distributed.checkpoint, or gather one file. In all of them the weights have their names. In one file the
optimiser's state has not: torch numbers parameters in the order of the optimiser's groups, Lightning's sharded
strategies in the order of the model, and each takes the other's numbers for its own. The one trick is to keep it by the
parameters' names everywhere, and to number it when an optimiser loads it.

A checkpoint replaces another only when it is whole: it is written beside it and renamed.
"""

import os
import shutil
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

from lit_fused.errors import UserError

_METADATA, _REST = ".metadata", "meta.pt"  # torch's list of all tensors; what Lightning keeps beside them, written last
_WEIGHTS = ("state_dict", "model")  # under which name a folder has them; "model" in those of FSDP1
_PREVIOUS = ".previous"


def checkpoint_fault(path: str | Path) -> str | None:
    """Why there is no whole checkpoint at a local path; None if there is one, as far as names of files tell."""
    path = Path(path)
    if not path.exists():
        previous = path.with_name(path.name + _PREVIOUS)
        hint = f"; {previous} is whole, a run was killed while it replaced it" if previous.exists() else ""
        return f"there is no {path}{hint}"
    missing = [name for name in (_METADATA, _REST) if not (path / name).is_file()]
    if path.is_dir() and missing:
        return (
            f"{path} is a folder without {' and '.join(missing)}, not a whole checkpoint: its run was killed while it "
            "wrote it, or it is another folder; give a checkpoint, such as its neighbour in the same folder"
        )
    return None


def read_metadata(folder: Path) -> tuple[Metadata, str]:
    """Of a folder: what it has, and the name under which it has the weights.

    Raises:
        UserError: it is no whole checkpoint of a Lightning run.
    """
    fault = checkpoint_fault(folder)
    if fault:
        raise UserError(fault)
    metadata = FileSystemReader(folder).read_metadata()
    for name in _WEIGHTS:
        if any(path[0] == name for path in _paths(metadata).values()):
            return metadata, name
    raise UserError(f"{folder} has no weights of a Lightning run (it has {', '.join(list(_paths(metadata))[:3])})")


def shapes_in(metadata: Metadata, weights: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight in a folder."""
    paths, entries = _paths(metadata), metadata.state_dict_metadata
    return {
        str(paths[key][1]): tuple(entry.size)
        for key, entry in entries.items()
        if paths[key][0] == weights and isinstance(entry, TensorStorageMetadata)
    }


def flattened(metadata: Metadata) -> bool:
    """Whether a folder has its optimisers' state flat, one entry for each parameter's each value."""
    return any(len(path) == 2 for path in _paths(metadata).values() if path[0].startswith("optimizer_"))


def read_folder(folder: Path, *, optimizers: bool = True, weights_only: bool | None = None) -> dict[str, Any]:
    """A folder as the content of one file, all tensors whole, in the memory of the CPU.

    Args:
        folder: of any number of ranks and any strategy.
        optimizers: whether to read their states, which are most of it.
        weights_only: as ``torch.load``'s, for what is no tensor.

    Raises:
        UserError: it is no whole checkpoint of a Lightning run.
    """
    metadata, weights = read_metadata(folder)
    paths = {key: path for key, path in _paths(metadata).items() if optimizers or path[0] == weights}
    entries = metadata.state_dict_metadata
    values: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for key in paths
        for entry in (entries[key],)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant to be
        load(values, checkpoint_id=folder, no_dist=True)
    tree: dict[Any, Any] = {}
    for key, path in paths.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = values[key]
    checkpoint = torch.load(folder / _REST, map_location="cpu", weights_only=weights_only)
    checkpoint["state_dict"] = tree.pop(weights)
    if optimizers:
        names = sorted((n for n in tree if n.startswith("optimizer_")), key=lambda n: int(n.removeprefix("optimizer_")))
        if names:
            checkpoint["optimizer_states"] = [_by_name(tree[name]) for name in names]
    return checkpoint


def read_weights(path: str | Path) -> dict[str, Any]:
    """The weights alone, by name, of a checkpoint that is a file or a folder, whole, in the memory of the CPU.

    Raises:
        UserError: it is no whole checkpoint of a Lightning run.
    """
    path = Path(path)
    fault = checkpoint_fault(path)
    if fault:
        raise UserError(fault)
    if path.is_dir():
        return read_folder(path, optimizers=False)["state_dict"]
    try:
        return torch.load(path, mmap=True, map_location="cpu", weights_only=True)["state_dict"]
    except (RuntimeError, UnpicklingError, EOFError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is no checkpoint of a Lightning run ({type(error).__name__} while it was read)"
        ) from error


def read_averages(path: str | Path) -> dict[str, Any]:
    """The averaged weights, by name, that a run with ``WeightAverage`` keeps in its optimisers' states; none of
    another run. ``path`` as :func:`read_weights` has read it."""
    path, key = Path(path), "average"
    if path.is_dir():
        metadata, _ = read_metadata(path)
        names: dict[str, str] = {}  # entry -> parameter
        for entry, (owner, *rest) in _paths(metadata).items():
            if owner.startswith("optimizer_") and ".".join(map(str, rest)).endswith(f".{key}"):
                names[entry] = ".".join(map(str, rest)).removeprefix("state.").removesuffix(f".{key}")
        entries = metadata.state_dict_metadata
        values = {entry: torch.empty(entries[entry].size, dtype=entries[entry].properties.dtype) for entry in names}  # type: ignore[union-attr]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(values, checkpoint_id=path, no_dist=True)
        return {names[entry]: value for entry, value in values.items()}
    states = torch.load(path, mmap=True, map_location="cpu", weights_only=True).get("optimizer_states", [])
    of_parameters = [item for state in states for item in state.get("state", {}).items()]
    return {name: state[key] for name, state in of_parameters if isinstance(name, str) and key in state}


def consolidate(folder: str | Path, file: str | Path) -> None:
    """Write a checkpoint that is a folder as one file, which any strategy resumes from; it appears whole or not at all.

    Raises:
        UserError: there is no such folder, or the file exists.
    """
    folder, file = Path(folder), Path(file)
    if file.exists():
        raise UserError(f"{file} exists already; choose another file")
    if folder.is_file():
        raise UserError(f"{folder} is one file already")
    MovableCheckpointIO().save_checkpoint(read_folder(folder), file)


def _paths(metadata: Metadata) -> dict[str, tuple[Any, ...]]:
    """Where each entry of a folder belongs in the tree that was saved."""
    return {key: tuple((metadata.planner_data or {}).get(key, (key,))) for key in metadata.state_dict_metadata}


def _by_name(saved: Mapping[str, Any]) -> dict[str, Any]:
    """An optimiser's state as a folder has it, flat or not, in torch's own form, but with names for numbers."""
    if "param_groups" in saved:
        return {"state": saved.get("state", {}), "param_groups": [g for _, g in sorted(saved["param_groups"].items())]}
    state: dict[str, dict[str, Any]] = defaultdict(dict)
    settings: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in saved.items():
        kind, _, rest = key.partition(".")
        name, _, entry = rest.rpartition(".")
        {"state": state, "param_groups": settings}[kind][name][entry] = value
    return {"state": dict(state), "param_groups": [{**group, "params": [name]} for name, group in settings.items()]}


# The optimiser's state, by name and by number.


def parameter_names(module: nn.Module) -> dict[int, str]:
    """The name of each parameter, by the identity of the parameter, in the order of the module."""
    return {id(p): name.replace("_fsdp_wrapped_module.", "") for name, p in module.named_parameters()}


def numbering(module: nn.Module, optimizer: Optimizer | None) -> list[str]:
    """The name that belongs to each number: in the order of the optimiser's groups, as torch numbers parameters, or
    without an optimiser in that of the module, as Lightning's sharded strategies do when they gather one file."""
    names = parameter_names(module)
    if optimizer is None:
        return list(names.values())
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def named_optimizer_state(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """An optimiser's state with the name of each parameter in the place of its number; one that has names as it is.

    Args:
        state: as of ``Optimizer.state_dict()``.
        names: the name that belongs to each number.
    """
    groups = state.get("param_groups", [])  # a rank that holds none of it has {}
    if not any(isinstance(number, int) for group in groups for number in group["params"]):
        return state
    return {
        "state": {names[number]: value for number, value in state["state"].items()},
        "param_groups": [{**group, "params": [names[number] for number in group["params"]]} for group in groups],
    }


def numbered_optimizer_state(state: dict[str, Any], groups: list[list[str]]) -> dict[str, Any]:
    """The inverse, for an optimiser with parameters of these names in these groups, whatever the order was.

    Raises:
        UserError: other parameters were trained, or in groups that cannot be mapped to these.
    """
    theirs = {name: group for group in state["param_groups"] for name in group["params"]}
    ours = {name for group in groups for name in group}
    check_same_trained(theirs.keys(), ours)
    number = {name: index for index, name in enumerate(name for group in groups for name in group)}
    numbered = []
    for names in groups:
        settings = [{key: value for key, value in theirs[name].items() if key != "params"} for name in names]
        if any(other != settings[0] for other in settings):
            raise UserError(
                f"the checkpoint's optimiser has the parameters of one group ({names[0]}, ...) in several groups with "
                "different settings; configure the parameter groups as in the run that wrote it"
            )
        numbered.append({**settings[0], "params": [number[name] for name in names]})
    return {"state": {number[name]: value for name, value in state["state"].items()}, "param_groups": numbered}


def load_by_name(optimizers: Iterable[Optimizer], module: nn.Module) -> None:
    """Let optimisers, from now on, load states with names as well as states with numbers."""
    names = parameter_names(module)

    def numbered(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        if not any(isinstance(name, str) for group in state["param_groups"] for name in group["params"]):
            return None
        return numbered_optimizer_state(state, [[names[id(p)] for p in g["params"]] for g in optimizer.param_groups])

    for optimizer in optimizers:
        optimizer.register_load_state_dict_pre_hook(numbered)


def check_numbers(states: Iterable[Mapping[str, Any]], optimizers: Iterable[Optimizer], module: nn.Module) -> None:
    """Refuse numbers that a sharded strategy would take for those of other parameters.

    Raises:
        UserError: a state of one file has numbers, and not those of the module's order.
    """
    order = {identity: number for number, identity in enumerate(parameter_names(module))}
    for state, optimizer in zip(states, optimizers, strict=False):
        theirs = [sorted(group["params"]) for group in state.get("param_groups", [])]
        if not any(isinstance(number, int) for group in theirs for number in group):
            continue
        if theirs != [sorted(order[id(p)] for p in group["params"]) for group in optimizer.param_groups]:
            raise UserError(
                "the checkpoint numbers the parameters of its optimiser's state, in another order than a sharded "
                "strategy does (it was written by plain Lightning or an earlier version); resume it once with "
                "strategy=auto or ddp and save: checkpoints of this version have names and load anywhere"
            )


def check_has_optimizers(has_them: bool, path: Path) -> None:
    """Raises:
    UserError: a fit is to go on from weights alone.
    """
    if not has_them:
        raise UserError(
            f"{path} has weights alone (save_weights_only), from which training cannot go on as it was; give another "
            "checkpoint, or start a new run with a model that has loaded lit_fused.checkpoints.read_weights(PATH)"
        )


def optimizers_in(metadata: Metadata) -> set[str]:
    """The names under which a folder has states of optimisers."""
    return {path[0] for path in _paths(metadata).values() if path[0].startswith("optimizer_")}


def trained_in(metadata: Metadata, index: int) -> set[str]:
    """The parameters for which a folder has a state of the optimiser of this index; none if it keeps no state."""
    paths = [path for path in _paths(metadata).values() if path[0] == f"optimizer_{index}"]
    nested = {str(path[2]) for path in paths if path[1] == "state"}
    flat = [str(path[1]) for path in paths if len(path) == 2 and str(path[1]).startswith("state.")]
    return nested | {key.removeprefix("state.").rpartition(".")[0] for key in flat}


def check_same_trained(theirs: Set[str], ours: Set[str]) -> None:
    """Raises:
    UserError: a checkpoint's optimiser trained other parameters.
    """
    odd = sorted(theirs ^ ours)
    if odd:
        raise UserError(
            f"the checkpoint's optimiser trained {len(theirs)} parameters, this one trains {len(ours)} ({odd[0]} is of "
            "one alone); freeze the same parameters as in the run that wrote it"
        )


# The model that a checkpoint is of.


def check_same_model(theirs: Mapping[str, tuple[int, ...]], ours: Mapping[str, tuple[int, ...]]) -> None:
    """Compare names and shapes of the weights of a checkpoint and of the model.

    Raises:
        UserError: they differ; the message has the first differences.
    """
    if theirs == ours:
        return
    differing = [f"{n}: {theirs[n]} there, {ours[n]} here" for n in ours if n in theirs and theirs[n] != ours[n]]
    differing += [f"{n}: only here" for n in ours.keys() - theirs.keys()]
    differing += [f"{n}: only in the checkpoint" for n in theirs.keys() - ours.keys()]
    shown = "; ".join(sorted(differing)[:3]) + ("; ..." if len(differing) > 3 else "")
    raise UserError(
        f"the checkpoint is of another model: {len(differing)} of {len({**ours, **theirs})} parameters differ "
        f"({shown}); use the model configuration that it was trained with"
    )


def shapes_of(state_dict: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight; those of distributed tensors are of the whole."""
    return {name: tuple(value.shape) for name, value in state_dict.items()}


# Writing.


def put_in_place(partial: Path, path: Path) -> None:
    """Rename what is whole now, a file or a folder, to ``path``, over what is there.

    A folder cannot be replaced in one step: between two renames the previous one is ``path`` with ".previous" added.
    """
    if not path.is_dir():
        if partial.is_dir():
            path.unlink(missing_ok=True)
        os.replace(partial, path)
        return
    previous = path.with_name(path.name + _PREVIOUS)
    remove(previous)
    path.rename(previous)
    partial.rename(path)
    remove(previous)


def remove(path: Path) -> None:
    """A file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def partial_path(path: Path) -> Path:
    """Where a checkpoint grows until it is whole."""
    return path.with_name(path.name + ".partial")


class MovableCheckpointIO(TorchCheckpointIO):
    """Lightning's own, but it reads folders as well, and a local file is never half written.

    Lightning's writes the file in memory first and then in the system's temporary folder, from where it is *copied* to
    another file system; a process that is killed meanwhile leaves half a file in the place of the last checkpoint.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if storage_options is not None or not isinstance(get_filesystem(path), LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_path(path)
        remove(partial)
        torch.save(checkpoint, partial)
        put_in_place(partial, path)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if isinstance(get_filesystem(path), LocalFileSystem):
            fault = checkpoint_fault(path)
            if fault:
                raise UserError(fault)
            if Path(path).is_dir():
                return read_folder(Path(path), weights_only=weights_only)
        return super().load_checkpoint(path, map_location, weights_only)


def prepare_checkpoints(strategy: Strategy) -> None:
    """Put the plugin above in the place of Lightning's; one of the user's own stays."""
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = MovableCheckpointIO()
