"""Read checkpoints, files or folders, from any strategy and any number of ranks; compare them with what loads them.

Strategies with whole parameters write one file. Sharded strategies write a folder in the format of
torch.distributed.checkpoint, with the parts of every rank, or gather one file. Weights have their names in all of them.

Nothing in a checkpoint can run code or lie outside of it: torch reads a folder's list of tensors with ``pickle.load``,
and its other values with ``weights_only=False``. Bytes that changed since they were written are found.
"""

import io
import os
import pickle
import re
import warnings
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.utils import _ReaderView
from torch.nn.parameter import is_lazy
from torch.serialization import _get_layout

from lit_fused.checkpoints.form import FORM, Weight, check_form, weights_in
from lit_fused.checkpoints.whole_or_not import METADATA, REST, check_whole, checkpoint_fault
from lit_fused.errors import UserError, check_not_packed

_CHECKSUM = "metadata.crc32"  # .metadata is no zip archive, and has no checksum of its own.
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


def check_bytes(file: Any, name: str = "") -> None:
    """Raise BadZipFile, with the ``name`` of one file of several, if it is packed or its checksums do not match."""
    try:
        with ZipFile(file) as archive:
            check_not_packed(archive)
            if (damaged := archive.testzip()) is not None:
                raise BadZipFile(f"the checksum of {damaged} does not match")
    except (BadZipFile, ValueError) as error:
        raise BadZipFile(f"{name}: {error}" if name else str(error)) from error


def write_checksum(folder: Path) -> None:
    """Write the checksum of a folder's list of tensors beside it."""
    (folder / _CHECKSUM).write_text(f"{zlib.crc32((folder / METADATA).read_bytes()):08x}\n")


@contextmanager
def reading(path: str | Path, fault: str = "is damaged") -> Iterator[None]:
    """Turn each error of a ``with`` block, which reads a checkpoint, into a UserError that names another checkpoint."""
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, CheckpointException) as error:  # torch raises any kind for damaged bytes
        # In torch.distributed each rank hears of the failures of all ranks.
        failures = [error] if not isinstance(error, CheckpointException) else [e for e, _ in error.failures.values()]
        cause = next((failure for failure in failures if isinstance(failure, UserError)), failures[0])
        raise cause if isinstance(cause, UserError) else unreadable(path, cause, fault) from error


def unreadable(path: str | Path, cause: BaseException, fault: str) -> UserError:
    """Return the sentence that says why a checkpoint cannot be read, which is a ``fault`` if it was one."""
    path = Path(path)
    text = f"{cause}".strip().split("\n")[0].rstrip(".") or type(cause).__name__
    text = f"{type(cause).__name__} {text}" if isinstance(cause, KeyError | AttributeError) else text
    named = re.search(r"GLOBAL (\S+)", f"{cause}") if isinstance(cause, pickle.UnpicklingError) else None
    if text.startswith("Missing key in checkpoint"):  # torch says so of an entry that is not listed.
        missing = text.rpartition(" ")[2]
        return UserError(f"{path} has no {missing}; configure model and optimizer as in the run that wrote it")
    if isinstance(cause, PermissionError):
        fault = "cannot be read (permission denied)"
    elif named:
        fault = f"is not opened: it names {named[1]}, and a checkpoint has tensors and plain values alone"
    elif path.is_dir() or (path.is_file() and path.open("rb").read(2) in (b"PK", b"")):
        fault = f"{fault} ({text})"
    else:
        fault = f"is no checkpoint of a Lightning run ({text})"
    others = [p for p in path.parent.glob("*.ckpt") if checkpoint_fault(p) is None and not p.samefile(path)]
    such_as = f", such as {max(others, key=lambda p: p.stat().st_mtime)}" if others else ""
    return UserError(f"{path} {fault}; use another checkpoint{such_as}")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"{METADATA}: GLOBAL {module}.{name}")
        return _KNOWN[module, name]


def _list_of(folder: Path) -> torchs.Metadata:
    """Return a folder's list of tensors. Raises UserError if it is damaged, or names a class that is not torch's own,
    or a file outside of the folder."""
    with reading(folder):
        content, checksum = (folder / METADATA).read_bytes(), folder / _CHECKSUM
        if checksum.is_file() and checksum.read_text().strip() != f"{zlib.crc32(content):08x}":
            raise BadZipFile(f"the checksum of {METADATA} does not match")
        metadata = _Unpickler(io.BytesIO(content)).load()
        if not isinstance(metadata, torchs.Metadata):
            raise pickle.UnpicklingError(f"{METADATA} is no list of tensors")
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path or info.relative_path == "..":
                raise UserError(f"{folder} is not opened: its {METADATA} names {info.relative_path}, outside of it")
            if info.transform_descriptors:
                raise UserError(f"{folder} is not opened: its {METADATA} has compressed entries, which no run writes")
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
            check_bytes(_Part(file, sinfo.offset, sinfo.length), sinfo.relative_path)
            self._checked.add(entry)
        return super()._slice_file(file, sinfo)


class _Planner(DefaultLoadPlanner):
    """Reads values that are no tensors as torch.load does with ``weights_only=True``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, torch.load(value, map_location="cpu", weights_only=True))


class CheckpointFolder:
    """A folder of torch.distributed.checkpoint, whose list of tensors is read; UserError if it is no checkpoint.

    Attributes:
        metadata: torch's list of all entries.
        paths: the path of each entry in the tree that was saved.
        optimizers: the names under which it has states of optimisers, in order.
    """

    def __init__(self, folder: Path) -> None:
        check_whole(folder)
        self.folder, self.metadata = folder, _list_of(folder)
        entries, planned = self.metadata.state_dict_metadata, self.metadata.planner_data or {}
        self.paths: dict[str, tuple[Any, ...]] = {key: tuple(planned.get(key, (key,))) for key in entries}
        owners = {path[0] for path in self.paths.values()}
        named = [owner for owner in owners if re.fullmatch(r"optimizer_\d+", str(owner))]
        self.optimizers = sorted(named, key=lambda name: int(name.removeprefix("optimizer_")))
        if "state_dict" not in owners:
            raise UserError(f"{folder} has no weights of a Lightning run (it has {', '.join([*self.paths][:3])})")

    def stored_weights(self) -> dict[str, Weight]:
        """Return name, shape and kind of every weight."""
        entries = self.metadata.state_dict_metadata
        of_weights = [(path[1], entries[key]) for key, path in self.paths.items() if path[0] == "state_dict"]
        tensors = [(str(name), e) for name, e in of_weights if isinstance(e, torchs.TensorStorageMetadata)]
        return {name: Weight.of(e.size, e.properties.dtype) for name, e in tensors}

    def is_flat(self) -> bool:
        """Return whether each value of an optimiser's state is an entry of its own."""
        return any(len(path) == 2 for path in self.paths.values() if path[0] in self.optimizers)

    def trained(self, optimizer: str) -> set[str]:
        """Return the parameters with a state of the named optimiser; none for a stateless optimiser."""
        paths = [path for path in self.paths.values() if path[0] == optimizer]
        flat = [str(path[1]) for path in paths if len(path) == 2 and str(path[1]).startswith("state.")]
        nested = {str(path[2]) for path in paths if path[1] == "state"}
        return nested | {key.removeprefix("state.").rpartition(".")[0] for key in flat}

    def read(self, keys: Iterable[str]) -> dict[str, Any]:
        """Read some entries, in one process, with whole tensors in CPU memory."""
        entries = {key: self.metadata.state_dict_metadata[key] for key in keys}
        values: dict[str, Any] = {
            key: torch.empty(e.size, dtype=e.properties.dtype) if isinstance(e, torchs.TensorStorageMetadata) else None
            for key, e in entries.items()
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is disabled on purpose
            self.load(values, no_dist=True)
        return values

    def load(self, values: dict[str, Any], *, no_dist: bool = False) -> None:
        """Fill ``values`` as torch's ``load`` does, with checked bytes and plain values alone."""
        with reading(self.folder):
            load(values, storage_reader=_Reader(self.folder, self.metadata), planner=_Planner(), no_dist=no_dist)


def read_folder(path: Path, *, optimizers: bool = True, weights_only: bool | None = None) -> dict[str, Any]:
    """Return the content of a folder as that of one file, with whole tensors in CPU memory.

    ``optimizers=False`` leaves their states out, most of the data. ``weights_only`` is torch.load's, for other values.
    """
    folder = CheckpointFolder(path)
    tree: dict[str, Any] = {}
    wanted = [key for key, (owner, *_) in folder.paths.items() if optimizers or owner == "state_dict"]
    for key, value in folder.read(wanted).items():
        set_element(tree, folder.paths[key], value)
    checkpoint = read_rest(path, weights_only)
    checkpoint["state_dict"] = tree.pop("state_dict")
    if optimizers and folder.optimizers:
        checkpoint["optimizer_states"] = [_in_torchs_form(tree[name]) for name in folder.optimizers]
    return checkpoint


def read_rest(folder: Path, weights_only: bool | None = None) -> dict[str, Any]:
    """Read what a folder has beside its list of tensors; ``weights_only`` is as in ``torch.load``."""
    return read_file(folder / REST, of=folder, weights_only=weights_only)


def read_file(path: Path, *, of: Path | None = None, mmap: bool = False, **options: Any) -> dict[str, Any]:
    """Compare a file of Lightning's with its checksums, then read it with the options of ``torch.load``, to the CPU by
    default. Raises UserError if that fails; it names the folder ``of`` the file, if the file is part of one."""
    with reading(of or path):
        check_bytes(path, path.name if of else "")
        checkpoint = torch.load(path, mmap=mmap, **{"map_location": "cpu", **options})
    missing = {"pytorch-lightning_version"} if of else {"pytorch-lightning_version", "state_dict"}
    if not isinstance(checkpoint, dict) or missing - checkpoint.keys():
        raise UserError(f"{of or path} is no checkpoint of a Lightning run (it has no {min(missing)})")
    with reading(of or path):
        check_form(checkpoint, FORM, "")
    return checkpoint


def step_of(path: Path) -> int:
    """Return the optimiser step of a checkpoint, without a look at its weights."""
    file = path / REST if path.is_dir() else path
    with reading(path), ZipFile(file) as archive:
        check_not_packed(archive)
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        check_form(content, FORM, "the whole")
    return content.get("global_step", -1)


def latest_in(folder: Path) -> Path | None:
    """Return the whole checkpoint of the latest step in a folder, of several the last written one; or None."""
    whole = (path for path in folder.glob("*.ckpt") if checkpoint_fault(path) is None)
    return max(whole, key=lambda path: (step_of(path), path.stat().st_mtime), default=None)


def read_weights(path: str | Path) -> dict[str, Any]:
    """Return a checkpoint's weights by name, whole, in CPU memory: their average if the run had one
    (:class:`~lit_fused.callbacks.WeightAverage`). UserError if Lightning did not write it."""
    path = Path(path)
    check_whole(path)
    if not path.is_dir():
        return read_file(path, mmap=True, weights_only=True)["state_dict"]
    folder = CheckpointFolder(path)
    names = {entry: ".".join(map(str, rest)) for entry, (owner, *rest) in folder.paths.items() if owner == "state_dict"}
    values = folder.read([*names])
    return {name: values[entry] for entry, name in names.items()}


def is_plain(value: Any) -> bool:
    """Return whether a value may be in a checkpoint: whether to read it can run no code."""
    if isinstance(value, Mapping):
        return all(is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple | set):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | complex | str | bytes | Tensor | torch.dtype)


def check_plain(path: Path) -> None:
    """Raise UserError if something in a folder could run code when torch reads it."""
    folder = CheckpointFolder(path)
    entries = folder.metadata.state_dict_metadata.items()
    folder.read([key for key, entry in entries if isinstance(entry, torchs.BytesStorageMetadata)])


def check_resumable(path: str | Path, is_resumable: bool) -> None:
    """Raise UserError unless a checkpoint has what training goes on with."""
    if not is_resumable:
        raise UserError(
            f"{path} has weights alone (save_weights_only), from which training cannot go on as it was; give another "
            "checkpoint, or start a new run with a model that has loaded lit_fused.checkpoints.read_weights(PATH)"
        )


def check_same_model(theirs: Mapping[str, Weight], ours: Mapping[str, Weight]) -> None:
    """Raise UserError, with the first differences, unless a checkpoint's weights have the model's names and shapes, and
    numbers of the same kind."""
    if theirs == ours:
        return
    differing = []
    for name in [name for name in ours if name in theirs and theirs[name] != ours[name]]:
        there, here = next((a, b) for a, b in zip(theirs[name], ours[name], strict=True) if a != b)
        differing.append(f"{name}: {there} there, {here} here")
    differing += [f"{n}: only here" for n in ours.keys() - theirs.keys()]
    differing += [f"{n}: only in the checkpoint" for n in theirs.keys() - ours.keys()]
    shown = "; ".join(sorted(differing)[:3]) + ("; ..." if len(differing) > 3 else "")
    raise UserError(
        f"the checkpoint is of another model: {len(differing)} of {len({**ours, **theirs})} parameters differ "
        f"({shown}); use the model configuration that it was trained with"
    )


def check_shared(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise UserError unless the weights that two state dicts share have the same shapes and kinds of numbers."""
    shaped = [name for name, value in ours.items() if isinstance(value, Tensor) and not is_lazy(value)]
    names = [name for name in shaped if isinstance(theirs.get(name), Tensor)]
    check_same_model(*(weights_in({name: state[name] for name in names}) for state in (theirs, ours)))


def check_same_trained(theirs: Set[str], ours: Set[str]) -> None:
    """Raise UserError unless a checkpoint's optimiser and this one train parameters of the same names."""
    odd = sorted(theirs ^ ours)
    if odd:
        raise UserError(
            f"the checkpoint's optimiser trained {len(theirs)} parameters, this one trains {len(ours)} ({odd[0]} is of "
            "one alone); freeze the same parameters as in the run that wrote it"
        )


def _in_torchs_form(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimiser's state, as a folder has it, in torch's form, with names in place of numbers."""
    if "param_groups" in saved:
        return {"state": {}, **saved}
    state: dict[str, dict[str, Any]] = defaultdict(dict)
    settings: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in saved.items():
        kind, _, rest = key.partition(".")
        name, _, entry = rest.rpartition(".")
        {"state": state, "param_groups": settings}[kind][name][entry] = value
    return {"state": dict(state), "param_groups": [{**group, "params": [name]} for name, group in settings.items()]}
