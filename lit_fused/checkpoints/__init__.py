"""Files and folders that any strategy resumes from. The names below are loaded on first use, and torch with them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_fused.checkpoints.movable import consolidate
    from lit_fused.checkpoints.reading import read_averages, read_weights

__all__ = ["consolidate", "read_averages", "read_weights"]

_PLACES = {"consolidate": "movable", "read_averages": "reading", "read_weights": "reading"}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
