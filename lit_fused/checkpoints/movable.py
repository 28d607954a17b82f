"""Plug this package's reading and writing of checkpoints into Lightning, and turn a folder into one file."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy

from lit_fused.checkpoints.reading import check_plain, read_file, read_folder
from lit_fused.checkpoints.whole_or_not import check_whole, written_whole
from lit_fused.errors import UserError


class MovableCheckpointIO(TorchCheckpointIO):
    """Lightning's plugin, but it also reads folders, and it never leaves half a file at a local path.

    Lightning's plugin writes the file in memory, then in the system's temporary folder, and *copies* it from there to
    another file system. A process that is killed meanwhile leaves half a file in the place of the last checkpoint.
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
    """Replace Lightning's plugin by :class:`MovableCheckpointIO`. A plugin of the user's own stays.

    Lightning's own sharded strategies read folders by themselves, with what could run code: it is looked for before.
    """
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = MovableCheckpointIO()
    theirs = FSDPStrategy.load_checkpoint, ModelParallelStrategy.load_checkpoint
    if type(strategy).load_checkpoint in theirs and "load_checkpoint" not in vars(strategy):
        vars(strategy)["load_checkpoint"] = partial(_load_plain, strategy.load_checkpoint)


def _load_plain(load: Callable[..., dict[str, Any]], checkpoint_path: str | Path, **options: Any) -> dict[str, Any]:
    if Path(checkpoint_path).is_dir():
        check_plain(Path(checkpoint_path))
    return load(checkpoint_path, **options)


def consolidate(folder: str | Path, file: str | Path) -> None:
    """Write a checkpoint that is a folder as one file, which any strategy resumes from. It appears whole or not at all.

    Raises UserError if there is no such folder, or the file exists.
    """
    folder, file = Path(folder), Path(file)
    if file.exists():
        raise UserError(f"{file} exists already; choose another file")
    if folder.is_file():
        raise UserError(f"{folder} is one file already")
    MovableCheckpointIO().save_checkpoint(read_folder(folder), file)
