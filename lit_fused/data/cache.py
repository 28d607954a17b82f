"""Prepare a folder once, however many processes ask for it and whenever one of them is killed.

The one trick: everything is written to a temporary sibling and appears under its final name by one atomic rename. A
folder that bears the final name is therefore complete. Of two processes that prepare it at once, the second to finish
finds the name taken, discards its own and uses the first one's. A killed one leaves a hidden folder of a random name,
which nobody opens.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

from lit_fused.errors import UserError


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/lit_fused``, or ``~/.cache/lit_fused`` where the variable is unset or empty."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lit_fused"


def content_key(documents: Iterable[str], **parameters: object) -> str:
    """32 hexadecimal digits that change with any byte of a document, with their order, or with a (JSON) parameter."""
    key = hashlib.sha256(json.dumps(parameters, sort_keys=True).encode())
    for document in documents:
        key.update(hashlib.sha256(document.encode()).digest())
    return key.hexdigest()[:32]


def prepare_once(folder: Path, prepare: Callable[[Path], None]) -> None:
    """Make sure that ``folder`` exists, complete: unless it does, call ``prepare(temporary)`` and rename the result.

    Raises:
        UserError: The folder's parent cannot be created or written.
    """
    if os.path.isdir(folder):  # False also where permission is lacking
        return
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"the cache folder {folder.parent} cannot be written: {error.strerror}; "
            "set data.cache_dir to a folder that can"
        ) from error
    try:
        prepare(temporary)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
