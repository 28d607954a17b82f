"""Save and restore what Lightning's checkpoints lack, so that a run continues exactly where it was saved.

Checkpoints contain no gradients. A checkpoint made among the accumulated micro-batches of an optimiser step records
that the first of them comes next: they run again, with the same weights and each rank's own random numbers.
"""

from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor

from lit_fused.checkpoints.optimizer_state import check_numbers, named_optimizer_state, numbering
from lit_fused.checkpoints.reading import check_same_model, shapes_of

_RANDOM_STATES = "lit_fused_random_states"  # in a checkpoint


class ExactResume:
    """Saves with a module what a fit that resumes it needs to go on exactly, and restores it."""

    def __init__(self) -> None:
        self._state: dict[str, Tensor] | None = None  # random numbers at the beginning of an optimiser step
        self._loaded: list[dict[str, Tensor]] = []  # of every rank, from a checkpoint

    def begin_step(self, device: torch.device) -> None:
        """Remember the random state with which an optimiser step of several micro-batches begins."""
        self._state = _random_state(device)

    def save(self, checkpoint: dict[str, Any], module: L.LightningModule, batches: int, *, is_sharded: bool) -> None:
        """Complete Lightning's checkpoint, in place; all ranks call it.

        Args:
            batches: number of micro-batches since the last optimiser step.
            is_sharded: no rank has the whole module.
        """
        trainer, loop = module.trainer, checkpoint["loops"]["fit_loop"]
        _begin_epoch(loop)
        _reopen_epoch(loop, trainer.num_training_batches, stepped=not batches)
        if batches:
            _rewind(loop, batches)
        own = (self._state if batches else None) or _random_state(module.device)
        ranks = getattr(trainer.strategy, "world_size", 1) if dist.is_initialized() else 1
        checkpoint[_RANDOM_STATES] = of_ranks = [own] * ranks
        if ranks > 1:
            dist.all_gather_object(of_ranks, own)
        states = checkpoint.get("optimizer_states", [])  # none if weights alone are saved
        for index, (state, optimizer) in enumerate(zip(states, trainer.optimizers, strict=False)):
            states[index] = named_optimizer_state(state, numbering(module, None if is_sharded else optimizer))

    def load(self, checkpoint: dict[str, Any], module: L.LightningModule, *, is_sharded: bool) -> None:
        """Take a checkpoint's random states for :meth:`restore`; UserError if it is of another model."""
        self._loaded = checkpoint.get(_RANDOM_STATES, [])
        if is_sharded:  # the strategy has loaded it already
            check_numbers(checkpoint.get("optimizer_states", []), module.trainer.optimizers, module)
        elif "state_dict" in checkpoint:
            check_same_model(shapes_of(checkpoint["state_dict"]), shapes_of(module.state_dict()))

    def restore(self, trainer: L.Trainer) -> None:
        """Restore this rank's random state, once; ignore states of another number of ranks or kind of device.

        The loader's iterator draws random numbers when it is made. If an epoch begins here, it is made again.
        """
        states, self._loaded = self._loaded, []
        strategy, loop = trainer.strategy, trainer.fit_loop
        if len(states) != getattr(strategy, "world_size", 1):
            return
        state = states[getattr(strategy, "global_rank", 0)]
        torch.set_rng_state(state["cpu"].cpu())
        if "cuda" in state and strategy.root_device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"].cpu(), strategy.root_device)
        at_beginning = loop.epoch_loop.batch_progress.current.ready % max(trainer.num_training_batches, 1) == 0
        loaders = loop._combined_loader.flattened if loop._combined_loader is not None else []
        if at_beginning and not any(hasattr(loader, "load_state_dict") for loader in loaders):
            iter(loop._data_fetcher)  # type: ignore[arg-type]


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _begin_epoch(fit_loop: dict[str, Any]) -> None:
    """Forget the last epoch's batches in the state of Lightning's loops, in place, if the next epoch is about to begin.

    Otherwise Lightning would count them as the next epoch's and skip it.
    """
    epochs = fit_loop["epoch_progress"]["current"]
    if epochs["ready"] > epochs["started"]:
        progress = fit_loop["epoch_loop.batch_progress"]
        progress["current"] = dict.fromkeys(progress["current"], 0)
        progress["is_last_batch"] = False


def _reopen_epoch(fit_loop: dict[str, Any], length: float, *, stepped: bool) -> None:
    """Turn the state of Lightning's loops at the end of an epoch, in place, into that after its last batch, if the fit
    ends before the epoch does. Otherwise a resumed run would go on with the next epoch.

    Args:
        length: number of batches of a whole epoch.
        stepped: the last batch ended an optimiser step.
    """
    epochs, progress = fit_loop["epoch_progress"], fit_loop["epoch_loop.batch_progress"]
    at_its_end = epochs["current"]["completed"] < epochs["current"]["processed"] == epochs["current"]["started"]
    if at_its_end and not progress["is_last_batch"] and progress["current"]["ready"] < length:
        for kind in ("total", "current"):
            epochs[kind]["processed"] -= 1
            progress[kind]["completed"] -= 1
        fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= stepped


def _rewind(fit_loop: dict[str, Any], batches: int) -> None:
    """Take ``batches`` micro-batches back in the state of Lightning's loops, in place."""
    progress = fit_loop["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        for name in counts:
            counts[name] -= batches
    progress["is_last_batch"] = False
    if progress["current"]["completed"] < progress["current"]["processed"]:  # at a batch's end Lightning will add one
        fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
