"""The optimiser's parameter groups, and what a project may give as optimiser and learning-rate schedule."""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import lightning as L
import transformers  # loads its schedules, and with them PEFT and bitsandbytes, when the first one is made
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adafactor, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lit_fused.errors import UserError, check_number
from lit_fused.models.language_model import LanguageModel
from lit_fused.parallel import local


def _share(fraction: float, num_training_steps: int, name: str = "warmup_fraction") -> int:
    check_number(name, fraction, "lie in [0, 1]", lambda x: 0 <= x <= 1)
    check_number("num_training_steps", num_training_steps, "be a finite number", math.isfinite)
    return min(round(fraction * num_training_steps), max(int(num_training_steps) - 1, 0))  # One step has its rate.


def cosine_with_warmup(optimizer: Optimizer, num_training_steps: int, warmup_fraction: float = 0.05) -> LRScheduler:
    """Return transformers' linear warm-up over a fraction of the steps, then cosine decay to zero."""
    return transformers.get_cosine_schedule_with_warmup(
        optimizer, _share(warmup_fraction, num_training_steps), num_training_steps
    )


def linear_with_warmup(optimizer: Optimizer, num_training_steps: int, warmup_fraction: float = 0.05) -> LRScheduler:
    """Return transformers' linear warm-up over a fraction of the steps, then linear decay to zero."""
    return transformers.get_linear_schedule_with_warmup(
        optimizer, _share(warmup_fraction, num_training_steps), num_training_steps
    )


def constant_with_warmup(optimizer: Optimizer, num_training_steps: int, warmup_fraction: float = 0.05) -> LRScheduler:
    """Return transformers' linear warm-up over a fraction of the steps, then a constant rate."""
    return transformers.get_constant_schedule_with_warmup(optimizer, _share(warmup_fraction, num_training_steps))


def warmup_stable_decay(
    optimizer: Optimizer,
    num_training_steps: int,
    warmup_fraction: float = 0.05,
    decay_fraction: float = 0.2,
    decay_type: Literal["linear", "cosine", "1-sqrt"] = "1-sqrt",
    min_lr_ratio: float = 0.0,
) -> LRScheduler:
    """Return transformers' linear warm-up, constant rate and decay over the last fraction of the steps ("WSD").

    Raises UserError if warm-up and decay take more than all steps.
    """
    warmup = _share(warmup_fraction, num_training_steps)
    decay = _share(decay_fraction, num_training_steps, "decay_fraction")
    check_number("min_lr_ratio", min_lr_ratio, "lie in [0, 1]", lambda x: 0 <= x <= 1)
    if warmup_fraction + decay_fraction > 1:
        raise UserError(
            f"warm-up and decay take {warmup_fraction} and {decay_fraction} of the steps, more than all of them; "
            "choose a smaller scheduler.warmup_fraction or scheduler.decay_fraction"
        )
    options: Any = {"decay_type": decay_type, "min_lr_ratio": min_lr_ratio}
    return transformers.get_wsd_schedule(
        optimizer, warmup, min(decay, num_training_steps - warmup), num_training_steps, **options
    )


# Out of decay: embeddings, most of whose rows have no gradient in a step, and Mamba's decay rates (Gu and Dao 2023).
NO_DECAY = ("embed", "A_log")


def hidden_matrices(model: LanguageModel) -> list[nn.Parameter]:
    """Return the 2-D parameters of a model that belong neither to an embedding nor to the output layer."""
    head = None if model.head is None else model.head.layer
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) or m is head]
    others = {id(p) for table in tables for p in table.parameters()}
    return [p for p in model.parameters() if p.ndim == 2 and p.requires_grad and id(p) not in others]


def weight_decay_groups(model: nn.Module, no_decay: Sequence[str] = NO_DECAY) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices, which decay; gains, biases and what ``no_decay`` names, which do not.

    A word names the parameters that have it in their name, or in that of their module's class: "embed" every
    ``nn.Embedding``, and an output layer that is tied to one. UserError if no parameter is to be trained.
    """
    named = {id(p) for word in no_decay for p in _named_by(word, model)}
    decay: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for p in model.parameters():
        if p.requires_grad:
            decay[p.ndim >= 2 and id(p) not in named].append(p)
    groups = [{"params": decay[True]}, {"params": decay[False], "weight_decay": 0.0}]
    found = [group for group in groups if group["params"]]
    if not found:
        raise UserError(
            f"no parameter of {type(getattr(model, 'backbone', model)).__name__} is to be trained; adapters that were "
            "loaded need PeftModel.from_pretrained(..., is_trainable=True)"
        )
    return found


def checked_no_decay(words: Sequence[str], model: nn.Module) -> tuple[str, ...]:
    """Return ``no_decay`` for a whole model; UserError for a word, other than the usual ones, that names nothing."""
    wrong = next((word for word in words if word not in NO_DECAY and next(_named_by(word, model), None) is None), None)
    if wrong is not None:
        names = ", ".join(
            dict.fromkeys(name.rpartition(".")[0].rpartition(".")[2] for name, _ in model.named_parameters())
        )
        raise UserError(f"no_decay={wrong}: no parameter has that in its name or its module's; there are {names}")
    return tuple(words)


def _named_by(word: str, model: nn.Module) -> Iterator[nn.Parameter]:
    for path, module in model.named_modules():
        in_class = word.lower() in type(module).__name__.lower()
        yield from (p for name, p in module.named_parameters(path, recurse=False) if in_class or word in name)


def can_fuse(trainer: L.Trainer) -> bool:
    """Return whether one kernel for all parameters can run: on a GPU, but not under a loss scale, which it would take
    away itself, after the gradients are clipped."""
    scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
    return trainer.strategy.root_device.type == "cuda" and not scaled


def build_optimizer(
    given: Optimizer | Callable[..., Optimizer],
    groups: list[dict[str, Any]],
    model: Any,
    module: nn.Module,
    *,
    fused: bool,
) -> Optimizer:
    """Return an optimizer of ``groups``, or the one that was given, whose parameters have to be the module's.

    ``groups`` are those of :func:`weight_decay_groups` of ``model``, the module's :class:`LanguageModel`. ``fused`` is
    for a ``functools.partial`` that leaves it open: one with the keyword ``fused=None``.
    """
    if not isinstance(given, Optimizer):
        if fused and isinstance(given, partial) and given.keywords.get("fused", False) is None:
            given = partial(given, fused=True)
        named = inspect.signature(given).parameters
        options = {"matrices": hidden_matrices(model)} if "matrices" in named else {}
        is_divided = any(isinstance(p, DTensor) for group in groups for p in group["params"])
        optimizer = given(groups, **options)
        # bitsandbytes' kernels take no shards, and its quantised moments have no shape that could be divided again.
        takes_whole = isinstance(optimizer, Adafactor) or type(optimizer).__module__.startswith("bitsandbytes.")
        if is_divided and takes_whole:
            raise UserError(
                f"{type(optimizer).__name__} looks at whole matrices, which this strategy divides; choose "
                "strategy=ddp, or optimizer=adamw"
            )
        step_on_parts(optimizer)  # already here, as torch reads a checkpoint by a step without gradients
        return optimizer
    own = {id(p) for p in module.parameters()}
    if not all(id(p) in own for group in given.param_groups for p in group["params"]):
        raise UserError(
            f"the {type(given).__name__} that was given has parameters that are not the module's: a sharded strategy, "
            "a grown vocabulary and weights that come late replace them; give what makes it, "
            "functools.partial(torch.optim.AdamW, lr=...), or override configure_optimizers"
        )
    return given


def step_on_parts(optimizer: Optimizer) -> None:
    """Let Adam and AdamW update this rank's parts of distributed parameters, entry by entry as before, and others the
    parameters one by one where some of a group are distributed and some are not.

    Each of torch's operations on a distributed tensor keeps the host busy, so that devices wait for small steps. The
    optimiser's state stays distributed. UserError for an option by which torch would update such a group at once.
    """
    if type(optimizer) not in (Adam, AdamW):  # Others look at whole matrices, or replace their state.
        for group in optimizer.param_groups:
            if len({isinstance(p, DTensor) for p in group["params"]}) > 1:
                _one_by_one(group, type(optimizer).__name__)
        return
    is_done = "_init_group" in vars(optimizer)
    if is_done or not any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
        return
    # torch's hooks run before and after a step; none comes between the lists of parameters, gradients and state, which
    # this method of Adam fills, and the update of what is in them.
    collect: Any = optimizer._init_group  # type: ignore[attr-defined]

    def collect_parts(group: dict[str, Any], *lists: list[Tensor]) -> Any:
        found = collect(group, *lists)
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return found

    optimizer._init_group = collect_parts  # type: ignore[attr-defined]


def _one_by_one(group: dict[str, Any], name: str) -> None:
    for option in ("foreach", "fused"):
        if group.get(option):
            raise UserError(
                f"{name} with {option}=True cannot update parameters of which some are divided over ranks and some "
                f"whole; leave {option} out, or choose optimizer=adamw"
            )
    if "foreach" in group:
        group["foreach"] = False  # On a GPU it is torch's default.


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
            if steps in (float("inf"), -1):  # -1: epochs of data without a length
                raise UserError(
                    "a learning-rate schedule needs the number of steps: set trainer.max_steps or trainer.max_epochs, "
                    "and for data without a length trainer.max_steps"
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
