"""Let the options with which an optimiser and its schedule are configured count in a resumed run.

Their states have their options as well, and a checkpoint's would replace those of the run that goes on with it.
"""

from copy import deepcopy
from typing import Any, NamedTuple
from warnings import catch_warnings

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from lit_fused.checkpoints.form import EVERY, check_form

_OPTIONS = "lit_fused_optimizer_options"  # the key in a checkpoint
_SCHEDULES = "lit_fused_schedule_options"
_SET_BY_SCHEDULES = {*("lr", "initial_lr", "max_lr", "min_lr", "momentum", "base_momentum", "max_momentum", "betas")}
_Options = list[list[dict[str, Any]]]  # of each optimiser and group: numbers by name


class _Begun(NamedTuple):
    """A schedule before its first step."""

    place: int  # among those of the trainer
    rates: list[dict[str, Any]]  # of each group, what schedules set
    state: dict[str, Any]
    text: dict[str, str]  # its class and its state


class ConfiguredOptions:
    """Saves what was configured, before a schedule changed it, and gives a resumed run what it configures anew."""

    def __init__(self) -> None:
        self._ours: _Options = []
        self._begun: list[_Begun] = []
        self._their_schedules: list[dict[str, str]] = []
        self._theirs: _Options | None = None  # the loaded checkpoint's, until they are restored

    def begin(self, trainer: L.Trainer) -> None:
        """Remember the options, before a checkpoint's state replaces them."""
        self._ours = [[*map(_configured, optimizer.param_groups)] for optimizer in trainer.optimizers]
        self._begun = [
            _Begun(place, _rates(s.optimizer.param_groups), deepcopy(s.state_dict()), _described(s))
            for place, s in _schedulers(trainer).items()
        ]
        self._begin_others(trainer._checkpoint_connector._loaded_checkpoint or {})

    def save(self, checkpoint: dict[str, Any]) -> None:
        checkpoint |= {_OPTIONS: self._ours, _SCHEDULES: [begun.text for begun in self._begun]}

    def load(self, checkpoint: dict[str, Any]) -> None:
        self._theirs = checkpoint.get(_OPTIONS, [])
        self._their_schedules = checkpoint.get(_SCHEDULES, [])
        check_form(self._theirs, [[{EVERY: None, "lr": 0.0}]], _OPTIONS)
        check_form(self._their_schedules, [{EVERY: ""}], _SCHEDULES)
        self._begin_others(checkpoint)

    def _begin_others(self, checkpoint: dict[str, Any]) -> None:
        """Replace the states, in place, that schedules of another kind or with other parts could not load, once both
        are known: some strategies load before a fit starts, others after it."""
        states = checkpoint.get("lr_schedulers", [])
        for (place, _, state, ours), there in zip(self._begun, self._their_schedules, strict=False):
            if place < len(states) and _changed(ours, there) and not _are_plateaus(ours, there):
                states[place] = state | {"last_epoch": states[place].get("last_epoch", 0)}

    def restore(self, trainer: L.Trainer) -> None:
        """Give the optimisers the options that differ, once, and the learning rates of this run's schedules, which can
        be of another kind or length. A rate that is set by no ``LambdaLR`` is changed by the same factor."""
        theirs, self._theirs = self._theirs, None
        if theirs is None:
            return
        changes: dict[str, str] = {}
        for optimizer, ours, there in zip(trainer.optimizers, self._ours, theirs, strict=False):
            for group, own, old in zip(optimizer.param_groups, ours, there, strict=False):
                new = {name: own[name] for name in own.keys() & old.keys() if own[name] != old[name]}
                changes |= {name: f"{name}={value} in place of {old[name]}" for name, value in new.items()}
                if "lr" in new and group["lr"] != old["lr"]:
                    new["lr"] *= group["lr"] / (old["lr"] or group["lr"])
                for name, value in new.items():
                    _set(group, name, value)
        schedulers = _schedulers(trainer).values()
        for scheduler in schedulers:
            rates = [own["lr"] for own in self._ours[trainer.optimizers.index(scheduler.optimizer)]]
            groups = scheduler.optimizer.param_groups
            if "base_lrs" in vars(scheduler) and ("lr" in changes or isinstance(scheduler, LambdaLR)):
                scheduler.base_lrs = rates
                for group, rate in zip(groups, rates, strict=True):
                    _set(group, "initial_lr", rate)
            if isinstance(scheduler, LambdaLR):
                for group, rate, factor in zip(groups, rates, scheduler.lr_lambdas, strict=True):
                    _set(group, "lr", rate * factor(scheduler.last_epoch))
        for scheduler, begun, there in zip(schedulers, self._begun, self._their_schedules, strict=False):
            if new := _changed(begun.text, there):
                _repeat(scheduler, begun, there, trainer.global_step // len(trainer.optimizers))
                named = {name: f"{name}={begun.text[name]} in place of {old}" for name, old in new.items()}
                changes |= {name: text for name, text in named.items() if name[0] != "_" and name != "base_lrs"}
        if changes:
            rank_zero_info(f"The optimizer goes on with {', '.join(changes.values())} in the checkpoint.")


def _schedulers(trainer: L.Trainer) -> dict[int, LRScheduler]:
    found = enumerate(config.scheduler for config in trainer.lr_scheduler_configs)
    return {place: scheduler for place, scheduler in found if isinstance(scheduler, LRScheduler)}


def _described(scheduler: LRScheduler) -> dict[str, str]:
    """Return the class and the state of a schedule that has not begun, as texts."""
    return {"kind": type(scheduler).__name__} | {name: _text(v) for name, v in scheduler.state_dict().items()}


def _changed(ours: dict[str, str], there: dict[str, str]) -> dict[str, str]:
    """Return what is other in the checkpoint; nothing for two ``LambdaLR``, whose functions cannot be compared."""
    if ours["kind"] == there.get("kind") == LambdaLR.__name__:
        return {}
    return {name: there[name] for name in ours.keys() & there.keys() if ours[name] != there[name]}


def _are_plateaus(ours: dict[str, str], there: dict[str, str]) -> bool:
    return ours["kind"] == there.get("kind") == ReduceLROnPlateau.__name__


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_text(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, Tensor):
        value = value.tolist()
    return str(value) if isinstance(value, str | int | float | None) else type(value).__name__


def _rates(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what schedules set."""
    return [deepcopy({name: group[name] for name in _SET_BY_SCHEDULES & group.keys()}) for group in groups]


def _repeat(scheduler: LRScheduler, begun: _Begun, there: dict[str, str], steps: int) -> None:
    """Bring a schedule, with the rates that it sets, from its beginning to where the checkpoint's was.

    That of a ``ReduceLROnPlateau`` is not known, only its options are set.
    """
    if _are_plateaus(begun.text, there):
        changed = _changed(begun.text, there)
        scheduler.load_state_dict({name: begun.state[name] for name in changed if name[0] != "_"})
        return
    steps = steps if there.get("kind") == ReduceLROnPlateau.__name__ else scheduler.last_epoch
    scheduler.load_state_dict(begun.state)
    for group, rates in zip(scheduler.optimizer.param_groups, begun.rates, strict=True):
        for name, value in rates.items():
            _set(group, name, value)
    if not isinstance(scheduler, ReduceLROnPlateau):
        with catch_warnings(action="ignore"):  # No optimiser has taken these steps.
            for _ in range(steps):
                scheduler.step()


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
