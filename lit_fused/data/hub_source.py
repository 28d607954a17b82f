"""Read a data set of the datasets library: a name on the Hugging Face Hub, a folder or a file.

Downloaded, the library keeps the whole split in its own cache, and several processes read it. Streamed, nothing is kept
but the tokens: one process reads the split from its beginning and stops after ``max_documents``.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any

from huggingface_hub import is_offline_mode

from lit_fused.data.option_checks import stat_of_file
from lit_fused.data.source import Document, Piece, Source, no_column, select_content
from lit_fused.errors import UserError, checked_options, needing

_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text", ".arrow": "arrow"}
_MIN_ROWS, _PIECES = 10_000, 1024  # the fewest rows of a piece, and the most pieces
_COMMIT = re.compile("[0-9a-f]{40}")


class HubSource(Source):
    """One split of a data set, as text or as records.

    Args:
        path: A name on the Hub; a folder of ``save_to_disk``, or of Parquet, JSON or CSV files; or such a file.
        name: The configuration ("subset"), where the data set has several.
        split: "train", or, where it is not streamed, a part such as "train[:10%]".
        revision: A branch, tag or commit on the Hub.
        streaming: Read without downloading all of it first.
        max_documents: Read only the first so many. None: all.

    ``pieces`` and ``read`` raise UserError if there is no such data set, split or column, or it cannot be reached.
    """

    kind = "hf"

    @checked_options("data.", max_documents=1)
    def __init__(
        self,
        path: str | Path,
        name: str | None = None,
        split: str = "train",
        revision: str | None = None,
        streaming: bool = False,
        max_documents: int | None = None,
    ) -> None:
        local = Path(path).expanduser()
        self.path: str | Path = local.absolute() if local.exists() else str(path)
        self.name = str(self.path)
        self.config_name, self.split, self.revision = name, split, revision
        self.streaming, self.max_documents = streaming, max_documents

    def identity(self) -> Any:
        which = (self.name, self.config_name, self.split, self.revision)
        return ["datasets", *which, self.column, self.columns, self.streaming, self.max_documents]

    def pieces(self) -> list[Piece]:
        if self.streaming:
            # A commit identifies the content, also without a way to the Hub.
            is_commit = not isinstance(self.path, Path) and _COMMIT.fullmatch(self.revision or "")
            version = self.revision if is_commit else self._loaded[1]
            return [Piece(self.max_documents or 1, version, None)]
        data, version = self._loaded
        rows = len(data) if self.max_documents is None else min(len(data), self.max_documents)
        step = max(_MIN_ROWS, -(-rows // _PIECES))
        ranges = [(start, min(start + step, rows)) for start in range(0, rows, step)]
        return [Piece(stop - start, [version, start, stop], (start, stop)) for start, stop in ranges]

    def read(self, piece: Piece) -> Iterator[Document]:
        start, data = (piece.payload or (0,))[0], self._with_columns(self._loaded[0])
        rows = data.select(range(*piece.payload)) if piece.payload else islice(data, self.max_documents)
        with self._explained():
            for row, record in enumerate(rows, start=start + 1):
                content = select_content(record, self.column)
                yield Document(content, lambda row=row: f"{self.name}, {self.split}, row {row}")

    @cached_property  # A Dataset pickles as the names of its files.
    def _loaded(self) -> tuple[Any, Any]:
        """Return the data set, and JSON that changes with its content."""
        with self._explained():
            return self._load()

    def _with_columns(self, data: Any) -> Any:
        names = data.column_names
        if names is None:  # the columns of a stream show only when it is read
            return data
        if self.column is not None and self.column not in names:
            raise UserError(f"{self.name}: {no_column(self.column, names)}")
        wanted = (self.columns or ()) if self.column is None else [self.column]
        read = [name for name in wanted if name in names]
        return data.select_columns(read) if read else data

    def _load(self) -> tuple[Any, Any]:
        with needing("data=hf", "train"):
            import datasets
        from lit_fused.models.hub import why_the_hub_is_silent  # The room loads torch.

        path, version = self.path, []
        if not isinstance(path, Path):
            if not is_offline_mode() and (reason := why_the_hub_is_silent()):  # the library tries for half a minute
                raise UserError(
                    f"there is no file or folder {path}, and the Hugging Face Hub cannot be asked for a data set of "
                    f"that name: {reason}; a copy in the library's cache is used with HF_HUB_OFFLINE=1"
                )
            builder = datasets.load_dataset_builder(path, self.config_name, revision=self.revision)
        elif saved := _saved_folder(path, self.split):
            data = datasets.load_from_disk(str(saved))
            assert isinstance(data, datasets.Dataset)
            return data.to_iterable_dataset() if self.streaming else data, _versions(saved.iterdir())
        elif path.is_dir():
            builder = datasets.load_dataset_builder(str(path), self.config_name)
        elif path.suffix in _READERS:
            stat_of_file(path)
            builder = datasets.load_dataset_builder(_READERS[path.suffix], data_files=str(path))
            version = _versions([path])
        else:
            raise UserError(f"data.path must end in one of {', '.join(_READERS)}, got {path}")
        version = [builder.config_id, builder.hash, *version]
        if self.streaming:
            return builder.as_streaming_dataset(self.split), version
        builder.download_and_prepare()
        return builder.as_dataset(self.split), version

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # the library raises what it likes: ValueError, OSError, RuntimeError, ...
            hint = "; look at its spelling, and log in with `hf auth login` if it is gated or private"
            hint = "; HF_HUB_OFFLINE is set, and the library's cache does not have it" if is_offline_mode() else hint
            text = shorten(str(error) or type(error).__name__, 300, placeholder="...").rstrip(".")
            raise UserError(
                f"the data set {self.name} (data.name={self.config_name}, data.split={self.split}) cannot be read: "
                f"{text}{'' if isinstance(self.path, Path) else hint}"
            ) from error


def _saved_folder(path: Path, split: str) -> Path | None:
    """Return the folder of a split that ``save_to_disk`` has written at ``path``; None if it has not."""
    if (path / "state.json").is_file():
        if split != "train":
            raise UserError(f"{path} holds one data set without splits; leave data.split at train, got {split}")
        return path
    if not (path / "dataset_dict.json").is_file():
        return None
    if not (path / split / "state.json").is_file():
        there = ", ".join(sorted(folder.parent.name for folder in path.glob("*/state.json")))
        raise UserError(f"{path} has no split {split}; those that are there: {there or 'none'}. Set data.split")
    return path / split


def _versions(files: Iterable[Path]) -> list[Any]:
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files)]
