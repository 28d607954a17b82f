"""Know which of a run's processes this is, and end it when the run has ended in another one."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lit_fused.errors import UserError

_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")  # of torchrun, Lightning and SLURM
_POLL_SECONDS, _GRACE_SECONDS = 0.5, 5.0
_parent = os.getppid()  # as early as possible: it may be gone soon


def _after_fork() -> None:
    global _parent
    _parent = os.getppid()


os.register_at_fork(after_in_child=_after_fork)


def is_first_rank() -> bool:
    """Return whether no launcher has started this process as a further rank of a run."""
    return all(os.environ.get(name, "0") in ("0", "") for name in _RANKS)


def end_with_run(error_file: Path) -> None:
    """End this rank some seconds after another one has written why it failed, or after its launcher is gone: it may
    wait for them where nothing can interrupt it."""
    start = time.time()

    def ended() -> bool:
        try:
            failed = error_file.stat().st_mtime >= start
        except OSError:
            failed = False
        return failed or is_orphan()

    _watch(ended, lambda: None, _GRACE_SECONDS, 1)


def end_with_parent(grace_seconds: float = 60.0) -> None:
    """End this process when its parent is gone: by SIGTERM, on which a run saves its state, and if need be for good."""
    _watch(is_orphan, lambda: os.kill(os.getpid(), signal.SIGTERM), grace_seconds, 128 + signal.SIGTERM)


def is_orphan() -> bool:
    """Return whether the process that started this one is gone."""
    return os.getppid() != _parent


def _watch(ended: Callable[[], bool], ask: Callable[[], None], grace_seconds: float, status: int) -> None:
    def watch() -> None:
        while not ended():
            time.sleep(_POLL_SECONDS)
        ask()
        time.sleep(grace_seconds)
        os._exit(status)

    threading.Thread(target=watch, daemon=True, name="end-with-the-run").start()


def check_port() -> None:
    """Raise UserError if this process cannot be the one at which the other ranks meet, before it starts them."""
    port = os.environ.get("MASTER_PORT", "")
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as server:
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("", int(port or 0)))
        except (OSError, ValueError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or "no port"
            raise UserError(
                f"MASTER_PORT={port} cannot be used ({reason}); set it to a free port, or leave it unset"
            ) from None
