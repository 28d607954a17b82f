"""Read records (documents, conversations, preferences, ...) from files, folders and the Hugging Face Hub.

Everything goes through the datasets library, which keeps what it has read as a memory-mapped Arrow table in its cache.
A text file is read here, not by the library, which changes line ends and holds a whole file in memory: a file is one
document, and a large one is several of about four million characters that end with a line. No code of a data set runs:
the library has no loading scripts, and no reader of pickles is named below.
"""

import codecs
import glob
import io
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import fsspec
from datasets import Dataset, concatenate_datasets, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from lit_fused.errors import UserError

DOCUMENT_SIZE = 2**22  # characters; a larger text file is several documents
TEXT_SUFFIXES = (".txt", ".md", ".py")
_JSON = ("json", {"parse_agent_traces": False})  # The library would take some chats for logs of coding agents.
_READERS = {
    ".jsonl": _JSON,
    ".json": _JSON,
    ".csv": ("csv", {"keep_default_na": False}),  # "None" and "NA" are text
    ".tsv": ("csv", {"keep_default_na": False, "sep": "\t"}),
    ".parquet": ("parquet", {}),
    ".arrow": ("arrow", {}),
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_STDLIB = Path(sysconfig.get_paths()["stdlib"])
# Its folders of installed packages, tests, generated tables and applications.
_STDLIB_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "ensurepip", "__pycache__", "test", "tests"}
    | {"encodings", "pydoc_data", "lib2to3", "idlelib", "turtledemo"}
)


def load_records(
    path: str | Path | None,
    *,
    columns: Sequence[str] | None = None,
    name: str | None = None,
    split: str = "train",
    revision: str | None = None,
    streaming: bool = False,
    max_documents: int | None = None,
    max_bytes: int | None = None,
    encoding: str = "utf-8",
    cache_dir: str | Path | None = None,
) -> Dataset:
    """Return the records of a file, a folder or a data set on the Hub, in their order.

    Args:
        path: A file or a folder of them, read recursively in the order of their paths: ``.jsonl`` and ``.json`` (lines
            or one list), ``.csv``, ``.tsv``, ``.parquet``, ``.arrow``, and text (``.txt``, ``.md``, ``.py``; any other
            single file), whose column is "text"; each also ``.gz``, ``.bz2``, ``.xz``, or ``.zst`` with zstandard
            installed. Or a folder of ``save_to_disk``; or a name on the Hub. None: the sources of Python's standard
            library.
        columns: Keep those of these that there are. None: all.
        name: The configuration of a data set on the Hub.
        split: On the Hub and of a folder of ``save_to_disk``, perhaps a part, "train[:10%]". Of other folders, the
            files ``train.*``, ``train-00000-of-00002.*`` and those in ``train/``, or where there are none, all; ``.py``
            files name no split.
        revision: A branch, tag or commit on the Hub.
        streaming: Read from the Hub no more than ``max_documents`` need. What was read is found again by its name.
        max_documents: The first so many.
        max_bytes: Of plain text files, the first so many.
        encoding: The character encoding of text, JSON and CSV, as Python names it.
        cache_dir: Where the library stores what it has read. None: its own place.

    UserError if there is no such file, one that cannot be read, or none of the ``columns``.
    """
    encoding = codecs.lookup(encoding).name
    place: dict[str, Any] = {} if cache_dir is None else {"cache_dir": str(Path(cache_dir).expanduser())}
    local = _STDLIB if path is None else Path(path).expanduser().absolute()
    try:
        if any((local / file).is_file() for file in ("state.json", "dataset_dict.json")):
            saved: Any = load_from_disk(str(local))
            parts = [saved if isinstance(saved, Dataset) else saved[split]]
        elif local.exists():
            parts = _parts(local, split, encoding, max_bytes, place)
        elif str(path).startswith((".", "/", "~")) or local.suffix in (*TEXT_SUFFIXES, *_READERS, *_COMPRESSED):
            raise UserError(f"there is no file or folder {local}; give the path of one, or the name of a data set")
        elif streaming:
            stream = {"path": str(path), "name": name, "split": split, "revision": revision, "most": max_documents}
            parts = [Dataset.from_generator(_streamed, gen_kwargs=stream, **place)]
        else:
            parts = [load_dataset(str(path), name, split=split, revision=revision, **place)]
    except (DatasetsError, ConnectionError) as error:  # Its cause may name what a stranger's file has.
        raise UserError(f"{path} cannot be read: {str(error.__cause__ or error).splitlines()[0]}") from error
    if columns is not None:
        there = sorted({column for part in parts for column in part.column_names})
        parts = [part.select_columns([c for c in columns if c in part.column_names]) for part in parts]
        parts = [part for part in parts if part.column_names]
        if not parts:
            raise UserError(f"{path} has the columns {', '.join(there)}, and none of {', '.join(columns)}")
    # Readers give strings of different widths.
    same = [part.features.type == parts[0].features.type or {*part.features} != {*parts[0].features} for part in parts]
    parts = [part if is_same else part.cast(parts[0].features) for part, is_same in zip(parts, same, strict=True)]
    records = concatenate_datasets(parts)
    return records if max_documents is None else records.select(range(min(max_documents, len(records))))


def _parts(local: Path, split: str, encoding: str, max_bytes: int | None, place: dict[str, Any]) -> list[Any]:
    """Return the records of a file, or of a folder's files, those of one kind that follow each other together."""
    base, files = re.split(r"[\[+]", split)[0], [local]
    if local == _STDLIB:
        files = find_files(local, (".py",), _STDLIB_SKIPPED)
    elif local.is_dir():
        suffixes = (*TEXT_SUFFIXES, *_READERS)
        files = find_files(local, tuple(suffix + packed for suffix in suffixes for packed in ("", *_COMPRESSED)))
        if not files:
            raise UserError(f"the folder {local} has no file that ends in {', '.join(suffixes)}")
        files = _of_split(files, local, base)
    parts: list[Any] = []
    for suffix, group in groupby(files, key=_suffix):
        if suffix not in _READERS:
            parts.append(_texts([*group], max_bytes, encoding, place))
            continue
        kind, options = _READERS[suffix]
        options = options | ({"encoding": encoding} if kind in ("json", "csv") else {})
        data_files = {base: [glob.escape(str(file)) for file in group]}
        parts.append(load_dataset(kind, data_files=data_files, split=split, **place, **options))
    return parts


def find_files(root: Path, suffixes: tuple[str, ...], skipped: frozenset[str] = frozenset()) -> list[Path]:
    """Return the files below ``root`` that end in one of ``suffixes``, sorted, without hidden files and folders. Links
    are followed, and a file to which several paths lead is read once."""
    names = glob.glob("**", root_dir=root, recursive=True)
    found = [root / name for name in names if name.endswith(suffixes) and not skipped & {*Path(name).parts}]
    return sorted({path.resolve(): path for path in sorted(found, reverse=True) if path.is_file()}.values())


def _of_split(files: list[Path], root: Path, split: str) -> list[Path]:
    """Return the files whose own name or folder names the split; all of them where no file names it. A program's
    ``train.py`` names none."""
    named = re.compile(rf"{re.escape(split)}(-\d+-of-\d+)?(\..*)?")
    data = [file for file in files if ".py" not in file.suffixes]
    chosen = [file for file in data if any(map(named.fullmatch, file.relative_to(root).parts))]
    if not chosen and split != "train":
        raise UserError(f"{root} has no file {split}.*, {split}-00000-of-00001.* or {split}/*")
    return chosen or files


def _suffix(file: Path) -> str:
    """Return the suffix below that of the compression: ".jsonl" of "a.jsonl.gz". All kinds of text are ".txt"."""
    suffix = Path(file.stem).suffix if file.suffix in _COMPRESSED else file.suffix
    return suffix if suffix in _READERS else ".txt"


def _texts(files: list[Path], max_bytes: int | None, encoding: str, place: dict[str, Any]) -> Any:
    named, left = [], sys.maxsize if max_bytes is None else max_bytes
    for file in files:
        size, changed = file.stat().st_size, file.stat().st_mtime_ns  # The library's cache is found by these.
        if left > 0:
            named.append((str(file), size, changed, left if size > left else None))
        left -= size
    sizes = [min(size, DOCUMENT_SIZE) for _, size, *_ in named]
    place = {**place, "writer_batch_size": max(1, min(1000, 4 * DOCUMENT_SIZE * len(sizes) // (sum(sizes) + 1)))}
    return Dataset.from_generator(_documents, gen_kwargs={"files": named, "encoding": encoding}, **place)


def _documents(files: list[tuple[str, int, int, int | None]], encoding: str) -> Iterator[dict[str, str]]:
    """Yield the documents of text files; of one that is cut, an incomplete last character is dropped."""
    for name, size, _, most in files:
        opened: Any = fsspec.open(name, "rb", compression="infer")
        with opened as stream:
            if most is None:
                content: Any = io.TextIOWrapper(stream, encoding, newline="")
            else:
                content = io.StringIO(codecs.getincrementaldecoder(encoding)().decode(stream.read(most)), newline="")
            try:
                while text := content.read(DOCUMENT_SIZE):
                    yield {"text": text if text.endswith("\n") else text + content.readline(DOCUMENT_SIZE)}
            except UnicodeDecodeError as error:
                raise UserError(f"{name} is not {encoding} ({error}); set data.encoding to its own") from error
        if not size:
            yield {"text": ""}  # The library refuses data without a record.


def _streamed(
    path: str, name: str | None, split: str, revision: str | None, most: int | None
) -> Iterator[dict[str, object]]:
    stream: Any = load_dataset(path, name, split=split, revision=revision, streaming=True)
    yield from stream if most is None else stream.take(most)
