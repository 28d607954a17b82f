"""Compare the content of a checkpoint with the form in which runs save it. Right checksums only say that its bytes are
those that somebody wrote.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

EVERY = object()  # a key of a form that stands for every key
_GROUPS = {"state": {EVERY: {"average": Tensor}}, "param_groups": [{"params": []}]}
FORM: dict[Any, Any] = {
    "global_step": 0,
    "epoch": 0,
    "callbacks": {},
    "loops": {},
    "state_dict": {EVERY: Tensor},
    "optimizer_states": [_GROUPS],
    "lr_schedulers": [{"last_epoch": 0}],
}


class Weight(NamedTuple):
    """The form of a weight, which the one that it is loaded into must have: torch casts other numbers silently."""

    shape: tuple[int, ...]
    numbers: str

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: torch.dtype) -> "Weight":
        kinds = {"floating-point": dtype.is_floating_point, "complex": dtype.is_complex, "boolean": dtype == torch.bool}
        return cls(tuple(shape), next((f"{kind} numbers" for kind, fits in kinds.items() if fits), "integers"))


def weights_in(state_dict: Mapping[str, Any]) -> dict[str, Weight]:
    """Return name, shape and kind of every weight. A distributed tensor has its whole shape."""
    return {name: Weight.of(value.shape, value.dtype) for name, value in state_dict.items()}


def check_count(name: str, there: int, here: int) -> None:
    """Raise ValueError unless a checkpoint has as many as the run that loads it."""
    if there != here:
        raise ValueError(f"{name} has {there} entries, and this run {here}")


def check_form(found: Any, form: Any, place: str, *, whole: bool = False) -> None:
    """Raise TypeError unless a value is of the kind of an example or class, the items of a list are like its first one,
    and the entries of a mapping like its entries, of which none may lack if it is to be ``whole``.

    A text and None as examples stand for anything.
    """
    kind = form if isinstance(form, type) else type(form)
    fits = isinstance(found, {dict: Mapping, float: (int, float)}.get(kind, kind))
    if not (form is None or kind is str) and (not fits or isinstance(found, bool) != (kind is bool)):
        raise TypeError(f"{place} is of the type {type(found).__name__}, where {kind.__name__} was expected")
    if isinstance(form, list) and form:
        for index, part in enumerate(found):
            check_form(part, form[0], f"{place}[{index}]", whole=whole)
    if isinstance(form, dict):
        if whole and (missing := form.keys() - found.keys() - {EVERY}):
            raise TypeError(f"{place} has no {min(missing)}")
        for name, part in found.items():
            check_form(part, form.get(name, form.get(EVERY)), f"{place}.{name}".removeprefix("."), whole=whole)
