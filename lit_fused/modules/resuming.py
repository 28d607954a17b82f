"""What a checkpoint needs besides Lightning's own, so that a run goes on exactly where it was made.

Gradients are in no checkpoint. One that is made among the accumulated micro-batches of an optimiser step says that the
first of them comes next: they are run again, with the weights and the random numbers that they were run with.

Random numbers (dropout's) are every rank's own.
"""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor


def begin_epoch(fit_loop: dict[str, Any]) -> None:
    """Forget the last epoch's batches in the state of Lightning's loops, in place, if the next epoch is about to begin:
    Lightning would take them for the next one's, and pass over it."""
    epochs = fit_loop["epoch_progress"]["current"]
    if epochs["ready"] > epochs["started"]:
        progress = fit_loop["epoch_loop.batch_progress"]
        progress["current"] = dict.fromkeys(progress["current"], 0)
        progress["is_last_batch"] = False


def rewind(fit_loop: dict[str, Any], batches: int) -> None:
    """Take ``batches`` micro-batches back in the state of Lightning's loops, in place."""
    progress = fit_loop["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        for name in counts:
            counts[name] -= batches
    progress["is_last_batch"] = False
    if progress["current"]["completed"] < progress["current"]["processed"]:  # at a batch's end Lightning will add one
        fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Of this process: "cpu" and, on a GPU, "cuda"."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(states: list[dict[str, Tensor]], strategy: Strategy) -> None:
    """This rank's of ``states``, unless they are those of another number of ranks, or of another kind of device."""
    if len(states) != getattr(strategy, "world_size", 1):
        return
    state = states[getattr(strategy, "global_rank", 0)]
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and strategy.root_device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), strategy.root_device)


def of_all_ranks(state: dict[str, Tensor], strategy: Strategy) -> list[dict[str, Tensor]]:
    """Every rank's, on every rank; all have to call it."""
    world_size = getattr(strategy, "world_size", 1)
    if world_size == 1 or not dist.is_initialized():
        return [state]
    states: list[dict[str, Tensor]] = [{}] * world_size
    dist.all_gather_object(states, state)
    return states
