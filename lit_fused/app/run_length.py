"""Decide how long a run is and when it validates, where the configuration leaves that open."""

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

DEFAULT_STEPS = 250
_NO_LIMIT = (None, -1)


def unless_steps(epochs: int, *, _parent_: Any) -> int | None:
    """Return a trainer's default epochs in a configuration, ``max_epochs: ${unless_steps:15}``: none where
    ``max_steps`` is given, which would else end with the epochs. An open one is -1 later in the run."""
    return epochs if _parent_.get("max_steps") in _NO_LIMIT else None


OmegaConf.register_new_resolver("unless_steps", unless_steps, replace=True)


def open_values(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for the null settings of a trainer's node. A run by epochs, or by neither, validates after each
    epoch, one by steps at its end; intervals in batches count through epochs, shares within one."""
    steps, interval = trainer.get("max_steps"), trainer.get("val_check_interval")
    every = trainer.get("check_val_every_n_epoch")
    by_epochs = trainer.get("max_epochs") not in _NO_LIMIT
    if steps is None:
        steps = -1 if by_epochs else DEFAULT_STEPS
    if interval in _NO_LIMIT:  # -1: ${.max_steps} of a run by epochs that an earlier version has configured
        batches = [steps, trainer.get("accumulate_grad_batches", 1)]
        at_end = every is None and not by_epochs and all(type(number) is int and number > 0 for number in batches)
        interval = batches[0] * batches[1] if at_end else 1.0
    if every is None and isinstance(interval, float):
        every = 1
    found = {"max_steps": steps, "val_check_interval": interval, "check_val_every_n_epoch": every}
    return {key: value for key, value in found.items() if key in trainer and trainer[key] != value}


def stopping_faults(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a fit, its values filled in, that is to stop early but validates at its end alone."""
    trainer, callbacks = content.get("trainer"), content.get("callbacks")
    if content.get("mode") != "fit" or not isinstance(trainer, dict) or not isinstance(callbacks, dict):
        return
    numbers: list[Any] = [trainer.get(key) for key in ("val_check_interval", "max_steps", "accumulate_grad_batches")]
    if not all(type(number) is int and number > 0 for number in numbers):
        return
    interval, steps, accumulated = numbers
    for name, node in callbacks.items() if interval >= steps * accumulated else ():
        if isinstance(node, dict) and str(node.get("_target_")).endswith(".EarlyStopping"):
            yield (
                f"trainer.val_check_interval: callbacks.{name} compares validations, and this run has one, at its end; "
                "give trainer.val_check_interval=50, or trainer.max_epochs=3"
            )
