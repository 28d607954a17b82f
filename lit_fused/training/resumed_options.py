"""Let the options with which optimisers and schedules are configured count in a resumed run.

A checkpoint has the options of the run that wrote it, and loading it replaces those that the resumed run was given. So
the options as they were configured are saved as well: where they differ, those of the resumed run are set again.
Schedules of torch are functions of the number of their steps: they take these steps anew, from the options of this run.
"""

from copy import deepcopy
from typing import Any
from warnings import catch_warnings

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

_CONFIGURED = "lit_fused_configured_options"  # the key in a checkpoint
_SET_BY_SCHEDULES = {*("lr", "initial_lr", "max_lr", "min_lr", "momentum", "base_momentum", "max_momentum", "betas")}
_OPTIONS_OF_PLATEAUS = {*("factor", "min_lrs", "patience", "cooldown", "mode", "threshold", "threshold_mode", "eps")}
_Options = list[list[dict[str, Any]]]  # of each optimiser and group: numbers by name


class ResumedOptions:
    """The options of a fit's optimisers and schedules before their first step, and those of a loaded checkpoint."""

    def __init__(self) -> None:
        self._ours: _Options = []
        self._theirs: _Options = []
        self._begun: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []  # a schedule's state, and what it has set
        self._schedules: list[dict[str, Any]] = []  # the loaded states
        self._steps = 0

    def begin(self, trainer: L.Trainer) -> None:
        """Remember the options, before a checkpoint's state replaces them."""
        self._ours = [[*map(_configured, optimizer.param_groups)] for optimizer in trainer.optimizers]
        schedulers = (config.scheduler for config in trainer.lr_scheduler_configs)
        self._begun = [(deepcopy(s.state_dict()), _set_by_schedules(s.optimizer.param_groups)) for s in schedulers]

    def save(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[_CONFIGURED] = self._ours

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Take the states of schedules out of a checkpoint: Lightning would load them into those of another kind."""
        self._theirs, self._steps = checkpoint.get(_CONFIGURED, []), checkpoint["global_step"]
        if "lr_schedulers" in checkpoint:  # It is not in a checkpoint of weights alone, of which Lightning says so.
            self._schedules, checkpoint["lr_schedulers"] = checkpoint["lr_schedulers"], []

    def restore(self, trainer: L.Trainer) -> None:
        """Give optimisers and schedules, which have loaded a checkpoint, the options of this run, and say which."""
        changes: dict[str, str] = {}
        for optimizer, ours, theirs in zip(trainer.optimizers, self._ours, self._theirs, strict=False):
            for group, own, old in zip(optimizer.param_groups, ours, theirs, strict=False):
                new = {name: own[name] for name in own.keys() & old.keys() if own[name] != old[name]}
                changes |= {name: f"{name}={value} in place of {old[name]}" for name, value in new.items()}
                if "lr" in new and group["lr"] != old["lr"]:  # It was changed in training: by the same factor here.
                    new["lr"] *= group["lr"] / (old["lr"] or group["lr"])
                for name, value in new.items():
                    _set(group, name, value)
        for config, begun, state in zip(trainer.lr_scheduler_configs, self._begun, self._schedules, strict=False):
            _go_on(config.scheduler, *begun, state, self._steps // max(1, len(trainer.optimizers)))
        if changes:
            rank_zero_info(f"The optimizer goes on with {', '.join(changes.values())} in the checkpoint.")


def _go_on(
    scheduler: Any, begun: dict[str, Any], rates: list[dict[str, Any]], state: dict[str, Any], done: int
) -> None:
    """Bring a schedule, with what it sets, from its beginning to where the checkpoint's was."""
    is_plateau = isinstance(scheduler, ReduceLROnPlateau)
    if is_plateau and "num_bad_epochs" in state:
        scheduler.load_state_dict(state | {name: begun[name] for name in _OPTIONS_OF_PLATEAUS & begun.keys()})
    elif not type(scheduler).__module__.startswith("torch."):
        scheduler.load_state_dict(state)
    elif not is_plateau:
        scheduler.load_state_dict(begun)
        for group, of_group in zip(scheduler.optimizer.param_groups, rates, strict=True):
            for name, value in of_group.items():
                _set(group, name, value)
        steps = done if "num_bad_epochs" in state else state.get("last_epoch", done)
        with catch_warnings(action="ignore"):  # No optimiser has taken these steps.
            for _ in range(steps):
                scheduler.step()


def _set_by_schedules(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [deepcopy({name: group[name] for name in _SET_BY_SCHEDULES & group.keys()}) for group in groups]


def _configured(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's options that are numbers, or several; its learning rate is that before any schedule."""
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in group.items()}
    kinds = {name: {*map(type, value if isinstance(value, tuple) else [value])} for name, value in plain.items()}
    numbers = {name: plain[name] for name, found in kinds.items() if found <= {int, float} and name != "initial_lr"}
    return numbers | {"lr": float(group.get("initial_lr", group["lr"]))}


def _set(group: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(group.get(name), Tensor):
        group[name].fill_(value)
    else:
        group[name] = value
