"""Know which of a run's processes this is, and end it when the run has ended in another one."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType

from lit_fused.errors import UserError

_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")  # torchrun, Lightning and SLURM set them.
_POLL_SECONDS, _GRACE_SECONDS, _SAVING_SECONDS = 0.5, 5.0, 60.0
_TERMINATED = 128 + signal.SIGTERM
_BY_SIGNAL, _SAME_SECONDS = (128 + signal.SIGINT, _TERMINATED), 1.0  # two of one signal within this time are one
_jobs: "SideBySide | None" = None  # of this process, if it runs jobs for another
_parent = os.getppid()  # It is read early because it may be gone soon.


def _after_fork() -> None:
    global _parent
    _parent = os.getppid()
    signal.set_wakeup_fd(-1)  # the signals of a worker are its own


os.register_at_fork(after_in_child=_after_fork)


def is_first_rank() -> bool:
    """Return whether no launcher has started this process as a further rank of a run."""
    return all(os.environ.get(name, "0") in ("0", "") for name in _RANKS)


def end_with_run(error_file: Path) -> None:
    """End this rank some seconds after another has failed or the launcher is gone: it may wait uninterruptibly."""
    start = time.time()

    def ended() -> bool:
        with suppress(OSError):
            if error_file.stat().st_mtime >= start:
                return True
        return os.getppid() != _parent

    _watch(ended, _GRACE_SECONDS, 1)


@cache
def end_if_deaf() -> None:
    """End this rank some seconds after Ctrl-C or SIGTERM if it waits for the other ranks to meet: torch does so in C++,
    up to 30 minutes, where Python handles no signal. Call it in the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)

    def position() -> tuple[int, int] | None:
        """Return where the main thread is; None unless the ranks are still to meet."""
        distributed = sys.modules.get("torch.distributed")
        if "MASTER_PORT" not in os.environ or distributed is None or distributed.is_initialized():
            return None
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        return id(frame), frame.f_lasti

    def watch() -> None:
        while True:
            number = os.read(reader, 1)[0]
            before = position()
            time.sleep(_GRACE_SECONDS)
            if number in (signal.SIGINT, signal.SIGTERM) and before and position() == before:
                os._exit(128 + number)

    threading.Thread(target=watch, daemon=True, name="end-if-deaf").start()


class SideBySide:
    """Let the processes that run the jobs of a sweep side by side end together. Whoever started them kills those that
    are left when one of them, or itself, ends: so all save their states first, and those that have saved wait.

    Args:
        folder: an empty one, in which each running job has a file named by its process.
    """

    def __init__(self, folder: Path) -> None:
        self.launcher = os.getpid()
        self._folder, self._stop = folder, folder / "stop"
        self._since = 0.0  # when the first Ctrl-C came

    def listen(self) -> None:
        """Wait on Ctrl-C until the jobs have saved their states. Call it in the process that starts them."""
        signal.signal(signal.SIGINT, self._handle)

    def begin(self) -> None:
        """Begin a job in this process."""
        if self.launcher == os.getpid():
            return
        self._folder.joinpath(str(os.getpid())).touch()
        global _jobs
        if _jobs is None:
            _jobs = self
            _watch(self._is_late, _SAVING_SECONDS, _TERMINATED, signal.SIGTERM)
        if self.is_over:
            self.end()

    def end(self) -> None:
        """End the job of this process, and the process if the others end too."""
        by_signal = isinstance(error := sys.exc_info()[1], SystemExit) and error.code in _BY_SIGNAL
        self._folder.joinpath(str(os.getpid())).unlink(missing_ok=True)
        if not self.is_over and not by_signal:
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        if not self.is_over:
            os.kill(self.launcher, signal.SIGINT)
        while os.getppid() == self.launcher:
            time.sleep(_POLL_SECONDS)
        with suppress(OSError):
            self._folder.rmdir()  # The last of them finds it empty.
        os._exit(_TERMINATED)

    @property
    def is_over(self) -> bool:
        return os.getppid() != self.launcher or self._stop.exists()

    def _is_late(self) -> bool:
        """Return whether this job still has to be asked to end: a terminal's Ctrl-C has reached all."""
        if self.is_over:
            time.sleep(_SAME_SECONDS)
            return True
        return False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._stop.exists():
            if time.monotonic() - self._since < _SAME_SECONDS:
                return
        else:
            self._since = time.monotonic()
            self._stop.touch()
            while time.monotonic() - self._since < _SAVING_SECONDS and len(list(self._folder.iterdir())) > 1:
                time.sleep(_POLL_SECONDS)
        raise KeyboardInterrupt


def end_if_asked() -> None:
    """End the job of this process, one of those that run side by side, and the process if the others end."""
    if _jobs is not None:
        _jobs.end()


def _watch(ended: Callable[[], bool], grace_seconds: float, status: int, ask: int = 0) -> None:
    def watch() -> None:
        while not ended():
            time.sleep(_POLL_SECONDS)
        if ask:
            os.kill(os.getpid(), ask)
        time.sleep(grace_seconds)
        os._exit(status)

    threading.Thread(target=watch, daemon=True, name="end-with-the-run").start()


def check_port() -> None:
    """Raise UserError if the other ranks of a run cannot meet at this process, the first, and would wait there."""
    port = os.environ.get("MASTER_PORT")
    if port is None or "TORCHELASTIC_RUN_ID" in os.environ:  # they meet at torchrun's own process
        return
    try:
        socket.create_server(("", int(port))).close()
    except (OSError, ValueError, OverflowError) as error:
        reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else "no number of a port"
        told = f"MASTER_PORT={port} cannot be used ({reason}); set it to a free one, or leave it unset"
        raise UserError(told) from None
