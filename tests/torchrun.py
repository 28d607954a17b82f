"""Starts a script's processes by torchrun, and leaves none behind."""

import os
import subprocess
import sys
from pathlib import Path

RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK")  # of a group in this process
COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def clean_environment(**more: str) -> dict[str, str]:
    """This process's, without a group that it may be in, and with one thread for each process."""
    own = {name: value for name, value in os.environ.items() if name not in RENDEZVOUS}
    return own | {"OMP_NUM_THREADS": "1"} | more


def torchrun(script: str | Path, processes: int, *arguments: object, timeout: float) -> tuple[int, str]:
    """Exit status and output of ``script`` in as many processes."""
    started = subprocess.Popen(
        [*COMMAND, str(processes), str(script), *map(str, arguments)],
        env=clean_environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = started.communicate(timeout=timeout)
    finally:
        if started.poll() is None:  # it ends its workers if it is asked to, but not if it is killed
            started.terminate()
            started.wait(60)
    return started.returncode, output


def run(script: str | Path, processes: int, *arguments: object, timeout: float) -> str:
    """The output of a run that has to succeed."""
    status, output = torchrun(script, processes, *arguments, timeout=timeout)
    assert status == 0, output[-6000:]
    return output
