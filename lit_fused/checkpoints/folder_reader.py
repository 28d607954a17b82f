"""Read the folders of torch.distributed.checkpoint so that nothing in them can run code or lie outside of them.

torch reads a folder's list of tensors with ``pickle.load``, and its other values with ``weights_only=False``.
"""

import io
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.utils import _ReaderView
from torch.serialization import _get_layout

from lit_fused.checkpoints.damage import check_bytes, checked_metadata, reading
from lit_fused.checkpoints.whole_or_not import METADATA
from lit_fused.errors import UserError

_CLASSES: tuple[Any, ...] = (
    *(torchs.Metadata, torchs.TensorStorageMetadata, torchs.BytesStorageMetadata, torchs.ChunkStorageMetadata),
    *(torchs.TensorProperties, torchs.MetadataIndex, torchs.StorageMeta, torchs._MEM_FORMAT_ENCODING),
    *(_StorageInfo, _get_layout, OrderedDict, torch.Size),
)
# A list of tensors may name those classes, dtypes, and the path that it was written to, which is read as a text.
_KNOWN: dict[tuple[str, str], Any] = {
    **{(known.__module__, known.__qualname__): known for known in _CLASSES},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{
        (module, name): lambda *parts: "/".join(parts)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"{METADATA}: GLOBAL {module}.{name}")
        return _KNOWN[module, name]


def read_list(folder: Path) -> torchs.Metadata:
    """Return a folder's list of tensors. Raises UserError if it is damaged, names other classes or files elsewhere."""
    with reading(folder):
        metadata = _Unpickler(io.BytesIO(checked_metadata(folder))).load()
        if not isinstance(metadata, torchs.Metadata):
            raise pickle.UnpicklingError(f"{METADATA} is no list of tensors")
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path or info.relative_path == "..":
                raise UserError(f"{folder} is not opened: its {METADATA} names {info.relative_path}, outside of it")
        metadata.storage_meta = metadata.storage_meta or torchs.StorageMeta()
    return metadata


class _Part(_ReaderView):
    """torch's view of a part of a file, but its end is where Python expects it."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        super().seek(self.len + offset if whence == os.SEEK_END else offset, whence % os.SEEK_END)
        return self.tell()


class _Reader(FileSystemReader):
    """Reads a folder whose list of tensors has been read, and checks the bytes of each entry."""

    def __init__(self, folder: Path, metadata: torchs.Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata
        self._checked: set[tuple[str, int]] = set()

    def read_metadata(self, *args: Any, **kwargs: Any) -> torchs.Metadata:
        return self._metadata

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        entry = sinfo.relative_path, sinfo.offset
        if entry not in self._checked:  # several ranks' parts can lie in one entry
            check_bytes(_Part(file, sinfo.offset, sinfo.length))
            self._checked.add(entry)
        return super()._slice_file(file, sinfo)


class _Planner(DefaultLoadPlanner):
    """Reads values that are no tensors as torch.load does with ``weights_only=True``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, torch.load(value, map_location="cpu", weights_only=True))


def load_entries(values: dict[str, Any], folder: Path, metadata: torchs.Metadata, *, no_dist: bool = False) -> None:
    """Fill ``values`` from a folder, as torch's ``load`` does, with checked bytes and plain values alone."""
    with reading(folder):
        load(values, storage_reader=_Reader(folder, metadata), planner=_Planner(), no_dist=no_dist)
