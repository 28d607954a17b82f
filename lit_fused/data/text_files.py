"""Find files on the disk, and open them whether compressed or not."""

import bz2
import gzip
import io
import lzma
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from lit_fused.errors import UserError

COMPRESSED: dict[str, Callable[[str], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda file: io.BufferedReader(cast(Any, pa.CompressedInputStream(pa.OSFile(file), "zstd"))),
}

# Folders of the standard library that hold installed packages, tests, generated tables and applications.
_STDLIB_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "ensurepip", "__pycache__", "test", "tests"}
    | {"encodings", "pydoc_data", "lib2to3", "idlelib", "turtledemo"}
)


def find_files(root: Path, suffixes: tuple[str, ...], skipped_folders: frozenset[str] = frozenset()) -> list[Path]:
    """Return the files below ``root`` that end in one of ``suffixes``, sorted, without hidden files and folders."""
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped_folders and not name.startswith(".")]
        files += [Path(folder, name) for name in names if name.endswith(suffixes) and not name.startswith(".")]
    return sorted(files)


def stdlib_folder() -> Path:
    """Return the folder of Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_files() -> list[Path]:
    """Return the sources of the standard library that read like code people write, sorted."""
    files = find_files(stdlib_folder(), (".py",), _STDLIB_SKIPPED)
    if not files:
        raise UserError(
            f"this Python has no .py files in {stdlib_folder()}; set data=text data.path to a file or folder of your "
            "own"
        )
    return files


def suffix_of_content(file: Path) -> str:
    """Return the suffix without that of the compression: ``.jsonl`` for ``a.jsonl.gz``."""
    return Path(file.stem).suffix if file.suffix in COMPRESSED else file.suffix


def open_content(file: str) -> Any:
    """Open a binary, buffered stream of the decompressed content."""
    return COMPRESSED[Path(file).suffix](file) if Path(file).suffix in COMPRESSED else open(file, "rb")


@contextmanager
def seekable_content(file: str) -> Iterator[Any]:
    """Yield the file's name, or a temporary copy of the decompressed content."""
    if Path(file).suffix not in COMPRESSED:
        yield file
        return
    with open_content(file) as packed, tempfile.TemporaryFile() as plain:
        shutil.copyfileobj(packed, plain)
        plain.seek(0)
        yield plain
