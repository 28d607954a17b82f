"""Files and folders that any strategy resumes from. The names below are loaded on first use, and torch with them."""

from typing import TYPE_CHECKING

from lit_fused import on_first_use

if TYPE_CHECKING:
    from lit_fused.checkpoints.movable import consolidate
    from lit_fused.checkpoints.reading import read_weights

_PLACES, __getattr__ = on_first_use(__name__)
__all__ = sorted(_PLACES)  # pyright: ignore[reportUnsupportedDunderAll]
