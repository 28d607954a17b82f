"""Skip by name what this machine cannot run; undo what a distributed strategy leaves in this process.

Tests marked `gpu` are skipped where there is none; Triton's interpreter then runs the kernels of the others. Tests
marked `needs_compiler` or `needs_browser` are skipped where the tool is missing, but fail where the variable CI is
"true". Each test process uses one thread: two share the cores.
"""

import contextlib
import functools
import gc
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator

# Before any import: some libraries read it then.
os.environ["XDG_CACHE_HOME"] = CACHE = tempfile.mkdtemp(prefix="lit_fused-tests-")

import forked
import pytest
from tools_here import browser, has_compiler


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sixth-of",
        metavar="COMMIT",
        help="of the slow tests, run the net and the sixth that the commit's hash chooses",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("dist", "no") != "no":
        return  # The process that only gives the tests out needs no library, and the others wait for it.
    import torch

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
        with contextlib.suppress(ImportError):  # Triton exists for Linux only.
            import interpreter  # noqa: F401
    # One of several test processes runs tests of every room: what it imports first, its server need not import again.
    if "PYTEST_XDIST_WORKER" in os.environ:
        forked.preload()
    # Before the tests are imported: what a library does at the end of a process, it would do to what the tests hold.
    forked.start_server()


def pytest_unconfigure() -> None:
    gc.unfreeze()
    shutil.rmtree(CACHE, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    if commit := config.getoption("sixth_of"):
        turn = int(commit, 16) % 6
        slow = [item for item in items if item.get_closest_marker("slow") and not item.get_closest_marker("net")]
        others = [item for item in slow if sixth(item.nodeid) != turn]
        config.hook.pytest_deselected(items=others)
        skipped = set(others)
        items[:] = [item for item in items if item not in skipped]
    missing = {} if torch.cuda.is_available() else {"gpu": "needs a CUDA device"}
    if os.environ.get("CI") != "true":
        if not has_compiler():
            missing["needs_compiler"] = "needs a C++ compiler (install g++)"
        if browser() is None:
            missing["needs_browser"] = "needs Chromium (apt-get install chromium)"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def sixth(nodeid: str) -> int:
    """Return the sixth, 0 to 5, that a test belongs to. It depends on the test's name alone: others may come and go."""
    return zlib.crc32(nodeid.encode()) % 6


def pytest_collection_finish() -> None:
    gc.freeze()  # A garbage collection then looks at what tests have made, and not at all that was imported.


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """A distributed strategy in this process leaves a group, and its address in the environment."""
    import torch

    before = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def lightning_logs_as_before() -> Iterator[None]:
    """A command in this process silences Lightning's log for good, which a later test may read."""
    yield
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)  # as its import does


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A backend that traces forward and backward as the real one does, without compiling kernels."""
    import torch
    from torch._dynamo.utils import counters

    compile = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
