"""Decide how long a run is and when it validates, where the configuration leaves that open."""

from collections.abc import Mapping
from typing import Any

DEFAULT_STEPS = 250
_SEVERAL = 20  # steps: a curve of the validation loss is worth its time
_NO_LIMIT = (None, -1)
_SHARES: dict[Any, float] = {1: 0.25, 2: 0.5}  # of an epoch, after which a fine-tuning of few epochs validates


def open_values(trainer: Mapping[str, Any], epochs: int | None = None) -> dict[str, Any]:
    """Return values for the null settings of a trainer's node. ``epochs``: those of the run by default; None: it
    has 250 steps by default.

    A run by epochs validates after each, or within few; one by steps four times, or at its end if it has few steps.
    Intervals in batches count through epochs, shares within one.
    """
    steps, passes = trainer.get("max_steps"), trainer.get("max_epochs")
    interval, every = trainer.get("val_check_interval"), trainer.get("check_val_every_n_epoch")
    if steps is None and passes is None:
        passes = epochs
    by_epochs = passes not in _NO_LIMIT
    if steps is None:
        steps = -1 if by_epochs else DEFAULT_STEPS
    if interval is None:
        batches, tunes = [steps, trainer.get("accumulate_grad_batches", 1)], epochs is not None
        if every is None and not by_epochs and all(type(number) is int and number > 0 for number in batches):
            interval = -(-steps // (4 if tunes or steps >= _SEVERAL else 1)) * batches[1]
        else:
            interval = _SHARES.get(passes, 1.0) if every is None and tunes else 1.0
    if every is None and isinstance(interval, float):
        every = 1
    found = {"max_steps": steps, "max_epochs": passes, "val_check_interval": interval, "check_val_every_n_epoch": every}
    return {key: value for key, value in found.items() if key in trainer and trainer[key] != value}
