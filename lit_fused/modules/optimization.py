"""The optimiser's parameter groups, and what a project may give as optimiser and learning-rate schedule."""

import inspect
from collections.abc import Callable, Set
from typing import Any

import lightning as L
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from transformers import get_cosine_schedule_with_warmup

from lit_fused.errors import UserError


def cosine_with_warmup(optimizer: Optimizer, num_training_steps: int, warmup_fraction: float = 0.05) -> LRScheduler:
    """Return transformers' linear warm-up over a fraction of the steps, then cosine decay to zero."""
    return get_cosine_schedule_with_warmup(optimizer, round(warmup_fraction * num_training_steps), num_training_steps)


def weight_decay_groups(model: nn.Module, matrices: Set[str] | None = None) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices and embeddings, which decay; gains and biases, which do not.

    The parameters named in ``matrices`` decay, by default those of two and more dimensions. FSDP1's flat shards have
    one dimension, so there the names have to be collected before the model is wrapped.
    """
    decay: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, p in model.named_parameters():
        if p.requires_grad:
            name = name.replace("_fsdp_wrapped_module.", "")
            decay[p.ndim >= 2 if matrices is None else name in matrices].append(p)
    groups = [{"params": decay[True]}, {"params": decay[False], "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(
    given: Optimizer | Callable[..., Optimizer], groups: list[dict[str, Any]], module: nn.Module
) -> Optimizer:
    """Return an optimizer of ``groups``, or the one that was given, whose parameters have to be the module's."""
    if not isinstance(given, Optimizer):
        return given(groups)
    own = {id(p) for p in module.parameters()}
    if not all(id(p) in own for group in given.param_groups for p in group["params"]):
        raise UserError(
            f"the {type(given).__name__} that was given has parameters that are not the module's: a sharded strategy, "
            "a grown vocabulary and weights that come late replace them; give what makes it, "
            "functools.partial(torch.optim.AdamW, lr=...), or override configure_optimizers"
        )
    return given


def with_schedule(
    optimizer: Optimizer, given: LRScheduler | Callable[..., LRScheduler] | None, trainer: L.Trainer
) -> OptimizerLRScheduler:
    """Return what ``configure_optimizers`` returns, with the schedule given, or made by what was given."""
    if given is None:
        return optimizer
    if not isinstance(given, LRScheduler):
        options = {}
        if "num_training_steps" in inspect.signature(given).parameters:
            steps = trainer.estimated_stepping_batches
            if steps == float("inf"):
                raise UserError(
                    "a learning-rate schedule needs the number of steps: set trainer.max_steps or trainer.max_epochs"
                )
            options["num_training_steps"] = int(steps)
        given = given(optimizer, **options)
    elif given.optimizer is not optimizer:
        raise UserError(
            f"the {type(given).__name__} that was given is of another optimizer than the module's; give that "
            "optimizer too, or what makes the scheduler: functools.partial(...), called with the optimizer"
        )
    config: Any = {"scheduler": given, "interval": "step"}
    if isinstance(given, ReduceLROnPlateau):
        monitor = "val/loss" if trainer.enable_validation else "train/loss"
        config = {"scheduler": given, "monitor": monitor, "frequency": trainer.check_val_every_n_epoch or 1}
    return {"optimizer": optimizer, "lr_scheduler": config}
