"""Say in a sentence what has failed around a run (a disk, a file, a port), or in an object of the configuration while
that was built or took its first step. No trace helps a person with these.

As long as nothing has been trained, an exception of any type that comes out of a library is about the configuration's
node that names it. Every other one is a fault of the program and keeps its trace; a note says that a step had ended.
"""

import errno
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from omegaconf.errors import OmegaConfBaseException

from lit_fused.app.ranks import is_first_rank
from lit_fused.atomic import WRITING
from lit_fused.errors import UserError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_MAKE_ROOM = "make room (or raise the limit), or choose another folder, and run again"
_NUMBER = re.compile(r"(?:os error |\[Errno )(\d+)")  # in the words of Rust and of Python
_TORCH = re.compile(r"inline_container|PytorchStreamWriter|File (\S+) cannot be opened|Parent directory (\S+) does not")


def fault_of(error: BaseException | None) -> str | None:
    """Return the sentence for an error, or for what caused it, if it is a fault of something outside."""
    if error is None:
        return None
    return _sentence(error) or fault_of(error.__cause__ or (None if error.__suppress_context__ else error.__context__))


@contextmanager
def one_sentence() -> Iterator[None]:
    """End the process with the sentence of a UserError or of a file's fault, which the first rank alone says."""
    try:
        yield
    except (UserError, OSError) as error:
        raise SystemExit((fault_of(error) or str(error)) if is_first_rank() else 1) from None


def _sentence(error: BaseException) -> str | None:
    text, path = str(error), getattr(error, "filename", None)
    if not isinstance(error, Exception):
        return None
    if "EADDRINUSE" in text or getattr(error, "errno", None) == errno.EADDRINUSE:
        port = os.environ.get("MASTER_PORT")
        return f"MASTER_PORT={port} is in use by another program; set it to a free port, or leave it unset"
    found = _NUMBER.search(text)
    number = (error.errno if isinstance(error, OSError) else None) or int(found[1] if found else 0)
    note = next((note for note in getattr(error, "__notes__", ()) if note.startswith(WRITING)), "a file")
    what = str(path or note.removeprefix(WRITING))
    if number in _FULL:
        return f"the disk is full: {what} could not be written whole ({os.strerror(number)}); {_MAKE_ROOM}"
    if number and (path is not None or number == errno.EIO):
        return f"{what} cannot be read or written ({os.strerror(number)}); see to it, or choose another folder"
    if isinstance(error, RuntimeError) and (found := _TORCH.search(text)):
        what = next(filter(None, found.groups()), what)
        return f"{what} could not be written whole: the disk is full, or its folder cannot be written; {_MAKE_ROOM}"
    return None


# The node whose objects a package's code works for, the first that fits.
_NODES = {
    "torch.optim.lr_scheduler": "scheduler",
    "torch.optim": "optimizer",
    "transformers.optimization": "scheduler",
    "transformers": "model",
    "peft": "model",
    "lightning.pytorch.callbacks": "callbacks",
    "lightning.pytorch.loggers": "logger",
    "lightning": "trainer",
}
_NEUTRAL = ("torch", "huggingface_hub", "lightning_utilities", "accelerate")  # called by all of them
_LONGEST = 600  # characters of a reason
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")


def explain(error: BaseException) -> str | None:
    """Return the sentence for an exception that is about the configuration and has no note; None for others."""
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key}: {str(error).partition(chr(10))[0]}"
    built = [note for note in getattr(error, "__notes__", ()) if note.startswith("full_key: ")]  # of Hydra 1.4
    if built or isinstance(error, InstantiationException):
        key = re.search("^full_key: (.*)", "\n".join([*built, str(error)]), re.MULTILINE)
        return _about(key[1] if key else "what is built", error if built else error.__cause__ or error)
    if not isinstance(error, Exception) or hasattr(error, "__notes__"):
        return None
    if isinstance(error, MemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY):
        return _about("the memory does not suffice for this model and this batch", error)
    node = _node_of(error)
    return None if node is None else _about(node, error)


def _node_of(error: Exception) -> str | None:
    """Return the node of the innermost code that is no common tool's; None if that is ours or the user's."""
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        module = str(frame.f_globals.get("__name__", ""))
        node = next((node for package, node in _NODES.items() if f"{module}.".startswith(f"{package}.")), None)
        if node is not None:
            return node
        if module.partition(".")[0] not in (*_NEUTRAL, *sys.stdlib_module_names):
            return None
    return None


def _about(key: str, error: BaseException) -> str:
    reason = " ".join(str(error).split()).rstrip(".!")
    if isinstance(error, KeyError | IndexError | AssertionError | AttributeError) or not reason:
        reason = f"{type(error).__name__} {reason}".rstrip()
    reason = reason if len(reason) <= _LONGEST else reason[:_LONGEST] + " ..."
    chosen = ", ".join(HydraConfig.get().overrides.task) if HydraConfig.initialized() else ""
    return (
        f"{key}: {reason}. Change what was chosen ({chosen or 'nothing'}); HYDRA_FULL_ERROR=1 shows where it was raised"
    )
