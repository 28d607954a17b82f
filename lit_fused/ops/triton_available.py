"""A check that Triton can build kernels here: it compiles its launcher with the system's C compiler."""

import functools
import os
import shutil
import warnings


@functools.cache
def kernels_can_be_built() -> bool:
    """Return whether a C compiler is there; warn once if not."""
    found = bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))
    if not found:
        warnings.warn(
            "Triton's kernels need a C compiler (install gcc): loss=chunked runs in plain PyTorch, exact but slower",
            stacklevel=2,
        )
    return found
