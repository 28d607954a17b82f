"""Tests marked `gpu` are skipped where there is none; Triton's interpreter then runs the kernels of the others.

Each test process uses one thread: two share the cores.
"""

import os
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """A distributed strategy in this process leaves a group, and its address in the environment."""
    before = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)
