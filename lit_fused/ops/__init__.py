"""Cross entropy of a linear output layer without its logits. It needs torch alone, and Triton on GPUs.

The folder imports nothing of the package around it. Its public names are loaded on first use, so that whoever needs
only its errors does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cross_entropy import linear_cross_entropy
    from .ranking import TopItems, top_items
    from .reference import linear_cross_entropy_reference, linear_distillation_reference, token_scores_reference
    from .scores import TokenScores, token_scores
    from .teacher import TeacherHead, linear_distillation
    from .user_error import UserError

_PLACES = {
    "linear_cross_entropy": "cross_entropy",
    "UserError": "user_error",
    "TopItems": "ranking",
    "top_items": "ranking",
    "linear_cross_entropy_reference": "reference",
    "linear_distillation_reference": "reference",
    "token_scores_reference": "reference",
    "TokenScores": "scores",
    "token_scores": "scores",
    "TeacherHead": "teacher",
    "linear_distillation": "teacher",
}
__all__ = list(_PLACES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PLACES[name]}", __name__), name)
