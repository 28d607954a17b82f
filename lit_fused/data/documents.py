"""Find a small corpus and read it into memory: one file is one document."""

import codecs
import os
import sysconfig
from pathlib import Path

from lit_fused.errors import UserError

TEXT_SUFFIXES = (".txt", ".md", ".py")

# In the standard library's folder: what pip installed, tests, generated tables, and applications.
_STDLIB_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "ensurepip", "__pycache__", "test", "tests"}
    | {"encodings", "pydoc_data", "lib2to3", "idlelib", "turtledemo"}
)


def read_documents(path: str | Path | None, max_bytes: int | None = None) -> list[str]:
    """Read a corpus into memory, one string per non-empty file, in the order of the files' paths.

    Args:
        path: A UTF-8 text file of any suffix; or a folder, of which every ``.txt``, ``.md`` and ``.py`` file is read,
            recursively, hidden files and folders excepted. None reads the sources of Python's standard library,
            leaving out files that are not UTF-8.
        max_bytes: Stop after this many bytes; the file that crosses the limit is cut there. None reads everything.

    Raises:
        UserError: The path is missing, holds no supported or only empty files, or a file cannot be read as UTF-8.
    """
    documents: list[str] = []
    remaining = max_bytes
    for file in stdlib_files() if path is None else _text_files(Path(path).expanduser()):
        if remaining == 0:
            break
        try:
            with file.open("rb") as stream:
                content = stream.read(-1 if remaining is None else remaining)
                whole = not stream.read(1)
            # A cut may fall inside a character: the decoder of a file that is not whole drops the incomplete one.
            document = codecs.getincrementaldecoder("utf-8")().decode(content, final=whole)
        except (OSError, UnicodeDecodeError) as error:
            if path is None:
                continue
            raise UserError(
                f"expected UTF-8 text in {file}, but it cannot be read: {error}; "
                "convert the file to UTF-8 or leave it out of data.path"
            ) from error
        if document:
            documents.append(document)
        if remaining is not None:
            remaining -= len(content)
    if not documents:
        raise UserError(
            f"{path or 'the standard library'} is empty: there is no text in it; set data.path to a file with text"
        )
    return documents


def stdlib_files() -> list[Path]:
    """The sources of the standard library that read like code people write, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = walk(root, (".py",), _STDLIB_SKIPPED_FOLDERS)
    if not files:
        raise UserError(
            f"this Python has no .py files in {root}; set data=text data.path to a file or folder of your own"
        )
    return files


def _text_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.exists():
        raise UserError(f"data.path must be a file or a folder, but {path} does not exist; give the path of a text")
    files = walk(path, TEXT_SUFFIXES)
    if not files:
        raise UserError(f"the folder {path} holds no {', '.join(TEXT_SUFFIXES)} file; set data.path to one that does")
    return files


def walk(root: Path, suffixes: tuple[str, ...], skipped_folders: frozenset[str] = frozenset()) -> list[Path]:
    """The files below ``root`` that end in one of ``suffixes``, sorted; nothing hidden."""
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped_folders and not name.startswith(".")]
        files += [Path(folder, name) for name in names if name.endswith(suffixes) and not name.startswith(".")]
    return sorted(files)
