"""A check that Triton can build kernels here: it compiles its launcher with the system's C compiler."""

import functools
import os
import shutil
import warnings
from importlib.util import find_spec


@functools.cache
def kernels_can_be_built() -> bool:
    """Return whether Triton, which exists for Linux only, and a C compiler are there; warn once without the latter."""
    if find_spec("triton") is None:
        return False
    found = bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))
    if not found:
        warnings.warn(
            "Triton's kernels need a C compiler (install gcc): loss=chunked runs in plain PyTorch, exact but slower",
            stacklevel=2,
        )
    return found
