"""Convert optimisers' states between names and numbers of parameters, so that any strategy resumes from any other.

torch numbers parameters in the order of the optimiser's groups, Lightning's sharded strategies in the order of the
model, and each takes the other's numbers for its own. So checkpoints store names, and an optimiser that loads one
numbers them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lit_fused.checkpoints.reading import check_same_trained
from lit_fused.errors import UserError


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Return the name of each parameter, by the parameter's ``id()``, in the order of the module."""
    return {id(p): name.replace("_fsdp_wrapped_module.", "") for name, p in module.named_parameters()}


def names_of_groups(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each of the optimiser's groups."""
    names = parameter_names(module)
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def numbering(module: nn.Module, optimizer: Optimizer | None) -> list[str]:
    """Return the name that belongs to each number, in the order of the optimiser's groups, as torch numbers parameters.

    Without an optimiser it is the module's order, as Lightning's sharded strategies number them in one file.
    """
    if optimizer is None:
        return list(parameter_names(module).values())
    return [name for group in names_of_groups(module, optimizer) for name in group]


def named_optimizer_state(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Replace each parameter's number by its name in a state of ``Optimizer.state_dict()``.

    ``names`` has the name that belongs to each number. A state that has names already is returned unchanged.
    """
    if not _has(int, state):
        return state
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[number]: value for number, value in state["state"].items()}, "param_groups": groups}


def numbered_optimizer_state(state: dict[str, Any], groups: list[list[str]]) -> dict[str, Any]:
    """Replace names by numbers, for an optimiser whose groups have the parameters of these names.

    Raises UserError if other parameters were trained, or in groups that cannot be mapped to these.
    """
    theirs = {name: group for group in state["param_groups"] for name in group["params"]}
    number = {name: index for index, name in enumerate(name for group in groups for name in group)}
    check_same_trained(theirs.keys(), number.keys())
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


def own_part(state: dict[str, Any], module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the part of a state with names that belongs to this optimiser's parameters, in the groups it has here."""
    groups = names_of_groups(module, optimizer)
    own = [name for group in groups for name in group]
    parts = [{**part, "params": [name for name in part["params"] if name in own]} for part in state["param_groups"]]
    mine = {"state": {name: v for name, v in state["state"].items() if name in own}, "param_groups": parts}
    return named_optimizer_state(numbered_optimizer_state(mine, groups), own)


def load_by_name(optimizers: Iterable[Optimizer], module: nn.Module) -> None:
    """Let optimisers, from now on, load states with names as well as states with numbers."""

    def numbered(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        return numbered_optimizer_state(state, names_of_groups(module, optimizer)) if _has(str, state) else None

    for optimizer in optimizers:
        optimizer.register_load_state_dict_pre_hook(numbered)
        optimizer.register_load_state_dict_post_hook(_refuse_another_optimizer)


def _refuse_another_optimizer(optimizer: Optimizer) -> None:
    """Raise UserError if the state that was loaded lacks options: the first step would look for them."""
    missing = {option for group in optimizer.param_groups for option in optimizer.defaults if option not in group}
    if missing:
        raise UserError(
            f"the checkpoint holds the state of another optimizer than {type(optimizer).__name__}: it has no "
            f"{', '.join(sorted(missing))}. Resume with the optimizer of the run, or begin a new run from its weights"
        )


def check_numbers(states: Iterable[Mapping[str, Any]], optimizers: Iterable[Optimizer], module: nn.Module) -> None:
    """Raise UserError if states of one file have numbers that a sharded strategy would misunderstand."""
    order = {identity: number for number, identity in enumerate(parameter_names(module))}
    for state, optimizer in zip(states, optimizers, strict=False):
        theirs = [sorted(group["params"]) for group in state.get("param_groups", [])]
        ours = [sorted(order[id(p)] for p in group["params"]) for group in optimizer.param_groups]
        if _has(int, state) and theirs != ours:
            raise UserError(
                "the checkpoint numbers the parameters of its optimiser's state, in another order than a sharded "
                "strategy does (it was written by plain Lightning or an earlier version); resume it once with "
                "strategy=auto or ddp and save: checkpoints of this version have names and load anywhere"
            )


def _has(kind: type, state: Mapping[str, Any]) -> bool:
    return any(isinstance(key, kind) for group in state.get("param_groups", []) for key in group["params"])
