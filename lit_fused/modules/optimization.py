"""The optimiser's parameter groups and the default learning-rate schedule."""

from collections.abc import Set
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_cosine_schedule_with_warmup


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
