"""Compare a checkpoint with the model and the optimisers that are about to load it."""

from collections.abc import Mapping, Set
from typing import Any

from lit_fused.errors import UserError


def shapes_of(state_dict: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every weight. A distributed tensor has its whole shape."""
    return {name: tuple(value.shape) for name, value in state_dict.items()}


def check_same_model(theirs: Mapping[str, tuple[int, ...]], ours: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UserError, with the first differences, unless a checkpoint's weights have the model's names and shapes."""
    if theirs == ours:
        return
    differing = [f"{n}: {theirs[n]} there, {ours[n]} here" for n in ours if n in theirs and theirs[n] != ours[n]]
    differing += [f"{n}: only here" for n in ours.keys() - theirs.keys()]
    differing += [f"{n}: only in the checkpoint" for n in theirs.keys() - ours.keys()]
    shown = "; ".join(sorted(differing)[:3]) + ("; ..." if len(differing) > 3 else "")
    raise UserError(
        f"the checkpoint is of another model: {len(differing)} of {len({**ours, **theirs})} parameters differ "
        f"({shown}); use the model configuration that it was trained with"
    )


def check_same_trained(theirs: Set[str], ours: Set[str]) -> None:
    """Raise UserError unless a checkpoint's optimiser and this one train parameters of the same names."""
    odd = sorted(theirs ^ ours)
    if odd:
        raise UserError(
            f"the checkpoint's optimiser trained {len(theirs)} parameters, this one trains {len(ours)} ({odd[0]} is of "
            "one alone); freeze the same parameters as in the run that wrote it"
        )
