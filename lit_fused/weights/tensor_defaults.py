"""Create tensors under torch's usual defaults, whatever the caller has set."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def ordinary_defaults(dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Create tensors on the CPU and in ``dtype`` unless the code says otherwise.

    Lightning calls ``configure_model`` with the run's device and precision as defaults.
    """
    outer = torch.get_default_dtype()
    with torch.device("cpu"):
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(outer)
