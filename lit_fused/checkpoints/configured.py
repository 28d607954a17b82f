"""Let the options with which an optimiser is configured count in a resumed run.

An optimiser's state has its options as well, and a checkpoint's would replace those of the run that goes on with it.
"""

from collections.abc import Iterable
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lit_fused.checkpoints.form import EVERY, check_form

_OPTIONS = "lit_fused_optimizer_options"  # the key in a checkpoint
_Options = list[list[dict[str, Any]]]  # of each optimiser and group: numbers by name


class ConfiguredOptions:
    """Saves what was configured, before a schedule changed it, and gives a resumed run what it configures anew."""

    def __init__(self) -> None:
        self._ours: _Options = []
        self._theirs: _Options | None = None  # the loaded checkpoint's; empty if it is of an earlier version

    def begin(self, optimizers: Iterable[Optimizer]) -> None:
        """Remember the options, before a checkpoint's state replaces them."""
        self._ours = [[*map(_configured, optimizer.param_groups)] for optimizer in optimizers]

    def save(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[_OPTIONS] = self._ours

    def load(self, checkpoint: dict[str, Any]) -> None:
        self._theirs = checkpoint.get(_OPTIONS, [])
        check_form(self._theirs, [[{EVERY: None, "lr": 0.0}]], _OPTIONS)

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
        for scheduler in (c.scheduler for c in trainer.lr_scheduler_configs if isinstance(c.scheduler, LRScheduler)):
            rates = [own["lr"] for own in self._ours[trainer.optimizers.index(scheduler.optimizer)]]
            groups = scheduler.optimizer.param_groups
            if "base_lrs" in vars(scheduler) and ("lr" in changes or isinstance(scheduler, LambdaLR)):
                scheduler.base_lrs = rates
                for group, rate in zip(groups, rates, strict=True):
                    _set(group, "initial_lr", rate)
            if isinstance(scheduler, LambdaLR):
                for group, rate, factor in zip(groups, rates, scheduler.lr_lambdas, strict=True):
                    _set(group, "lr", rate * factor(scheduler.last_epoch))
        if changes:
            rank_zero_info(f"The optimizer goes on with {', '.join(changes.values())} in the checkpoint.")


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
