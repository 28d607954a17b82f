"""Plug this package's reading and writing of checkpoints into Lightning, and turn a folder into one file.

The paths that a checkpoint contains lead nowhere but into the run's own folder of checkpoints.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lit_fused.checkpoints.form import check_count, check_form
from lit_fused.checkpoints.reading import check_plain, read_file, read_folder, reading
from lit_fused.checkpoints.resuming import check_moments
from lit_fused.checkpoints.whole_or_not import check_whole, written_whole
from lit_fused.errors import UserError

_PROGRESS = ("loops", "callbacks")  # Lightning passes over them where they lack.
_PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")


class MovableCheckpointIO(TorchCheckpointIO):
    """Lightning's plugin, which reads folders as well and never leaves half a file at a local path.

    Lightning's own copies a file from a temporary folder: a kill leaves half of it in place of the last checkpoint.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if storage_options is not None or not isinstance(get_filesystem(path), LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as unfinished:
            torch.save(checkpoint, unfinished)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if isinstance(get_filesystem(path), LocalFileSystem):
            check_whole(path)
            if Path(path).is_dir():
                return read_folder(Path(path), weights_only=weights_only)
            return read_file(Path(path), map_location=map_location, weights_only=weights_only)
        return super().load_checkpoint(path, map_location, weights_only)


def prepare_checkpoints(strategy: Strategy) -> None:
    """Put :class:`MovableCheckpointIO` in place of Lightning's plugin, if the user has chosen no other.

    Lightning's ``ModelParallelStrategy`` reads folders by itself. It looks first for what could run code.
    """
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = MovableCheckpointIO()
    is_lightnings = type(strategy).load_checkpoint is ModelParallelStrategy.load_checkpoint
    if is_lightnings and "load_checkpoint" not in vars(strategy):
        vars(strategy)["load_checkpoint"] = partial(_load_plain, strategy.load_checkpoint)


def restore_in_sentences(trainer: L.Trainer) -> None:
    """Let errors while Lightning restores a checkpoint be a UserError, and refuse what it would pass over: a number of
    optimisers or schedules, and a progress of loops, that are not the run's."""
    connector: Any = trainer._checkpoint_connector
    for name in ("_restore_modules_and_callbacks", "restore_training_state"):
        vars(connector)[name] = partial(_restored, trainer, getattr(type(connector), name).__get__(connector))


def _restored(trainer: L.Trainer, restore: Callable[..., None], *arguments: Any) -> None:
    with reading(str(arguments[0] if arguments else trainer.ckpt_path), "is damaged, or of a run with other settings"):
        try:
            checkpoint = trainer._checkpoint_connector._loaded_checkpoint
            if checkpoint and trainer.state.fn == TrainerFn.FITTING:
                here = {"optimizer_states": trainer.optimizers, "lr_schedulers": trainer.lr_scheduler_configs}
                for name, ours in here.items():
                    check_count(name, len(checkpoint.get(name, ours)), len(ours))
                check_moments(checkpoint, checkpoint.get("optimizer_states", []), trainer.optimizers)
                if not arguments:  # The weights have come, and the checkpoint is none of weights alone.
                    check_form(checkpoint, {name: {} for name in _PROGRESS}, "the checkpoint", whole=True)
                # Other versions of Lightning have other entries beside the progress.
                ours = trainer.fit_loop.state_dict()
                form = {"fit_loop": {name: ours[name] for name in ours if name.endswith("progress")}}
                check_form(checkpoint.get("loops", form), form, "loops", whole=True)
            restore(*arguments)
        except MisconfigurationException as error:  # Lightning's sentence on the trainer's settings
            raise UserError(str(error)) from error


def _load_plain(load: Callable[..., dict[str, Any]], checkpoint_path: str | Path, **options: Any) -> dict[str, Any]:
    if Path(checkpoint_path).is_dir():
        check_plain(Path(checkpoint_path))
    return load(checkpoint_path, **options)


def consolidate(folder: str | Path, file: str | Path) -> None:
    """Write a checkpoint folder as one file, from which any strategy resumes; it appears whole or not at all.

    Raises UserError if there is no such folder, or if the file exists.
    """
    folder, file = Path(folder), Path(file)
    if file.exists():
        raise UserError(f"{file} exists already; choose another file")
    if folder.is_file():
        raise UserError(f"{folder} is one file already")
    MovableCheckpointIO().save_checkpoint(read_folder(folder), file)


def keep_own_paths(states: dict[str, Any], callbacks: Iterable[Callback]) -> None:
    """Change loaded states of ``ModelCheckpoint`` callbacks in place: let them name files of their own folder alone.
    Raise TypeError for a state of ``EarlyStopping`` of another form.

    Lightning reads and deletes the files that they name. Of each path the file's name counts, in the callback's present
    folder, as the run may have been moved. A file that is not there, or that is a link to elsewhere, is forgotten with
    its score.
    """
    for callback in callbacks:
        state = states.get(callback.state_key)
        if state and isinstance(callback, EarlyStopping):
            check_form(state, callback.state_dict(), callback.state_key)
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
    if "://" in folder:  # Another file system has no links.
        return path if os.path.dirname(path) == folder else ""
    own = os.path.join(folder, os.path.basename(path))
    inside = os.path.dirname(os.path.realpath(own)) == os.path.realpath(folder)
    return own if inside and os.path.exists(own) else ""
