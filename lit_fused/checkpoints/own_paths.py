"""Let the paths that a checkpoint contains lead nowhere but into the run's own folder of checkpoints."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

_PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")


def keep_own_paths(states: dict[str, Any], callbacks: Iterable[Callback]) -> None:
    """Rewrite, in place, the states of ``ModelCheckpoint`` callbacks in a checkpoint that is loaded.

    Lightning reads and deletes what they name. A file counts by its name, in the callback's own folder, where the run
    may have been moved to; what is not there, or is a link to elsewhere, is forgotten together with its score.
    """
    for callback in callbacks:
        state = states.get(callback.state_key)
        if isinstance(callback, ModelCheckpoint) and isinstance(state, dict):
            state.update(_own_state(state, callback), dirpath=callback.dirpath)


def _own_state(state: Mapping[str, Any], callback: ModelCheckpoint) -> dict[str, Any]:
    folder = str(callback.dirpath)
    own: dict[str, Any] = {name: _own(state.get(name), folder) for name in _PATHS}
    scores = state.get("best_k_models")
    found = {_own(path, folder): score for path, score in (scores if isinstance(scores, dict) else {}).items()}
    own["best_k_models"] = {path: score for path, score in found.items() if path and isinstance(score, Tensor)}
    if own["kth_best_model_path"] not in own["best_k_models"]:
        own["kth_best_model_path"] = ""
        if 0 < callback.save_top_k <= len(own["best_k_models"]):  # Lightning would look up its score.
            own["best_k_models"] = {}
    own["best_model_score"] = state.get("best_model_score") if own["best_model_path"] else None
    return own


def _own(path: object, folder: str) -> str:
    if not isinstance(path, str) or os.path.basename(path) in ("", ".", ".."):
        return ""
    if "://" in folder:  # of another file system, which has no links
        return path if os.path.dirname(path) == folder else ""
    own = os.path.join(folder, os.path.basename(path))
    inside = os.path.dirname(os.path.realpath(own)) == os.path.realpath(folder)
    return own if inside and os.path.exists(own) else ""
