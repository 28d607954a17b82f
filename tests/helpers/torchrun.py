"""Start the ranks of a script, by torchrun or forked, and leave no process behind."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import forked

RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK")  # of a group in this process
HELPERS = str(Path(__file__).parent)  # scripts of tools/ import from here too
COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def clean_environment(**more: str) -> dict[str, str]:
    """Return this process's environment, without a group that it may be in, and with one thread for each process.

    Nor has it the seed that an earlier test's run has left there, by which Lightning would shuffle what ranks read.
    """
    own = {name: value for name, value in os.environ.items() if name not in (*RENDEZVOUS, "PL_GLOBAL_SEED")}
    return own | {"OMP_NUM_THREADS": "1"} | more


def torchrun(script: str | Path, processes: int, *arguments: object, timeout: float, **more: str) -> tuple[int, str]:
    """Run ``script`` in as many processes. Return the exit status and the output."""
    path = os.pathsep.join(filter(None, [HELPERS, os.environ.get("PYTHONPATH")]))
    started = subprocess.Popen(
        [*COMMAND, str(processes), str(script), *map(str, arguments)],
        env=clean_environment(**{"PYTHONPATH": path} | more),
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
    """Run the ranks of ``script`` as torchrun does, but forked. Return the output; all must succeed."""
    statuses, output = run_whatever_comes(script, processes, *arguments, timeout=timeout)
    assert statuses == [0] * processes, output[-6000:]
    return output


def run_whatever_comes(
    script: str | Path, processes: int, *arguments: object, timeout: float, **more: str
) -> tuple[list[int | None], str]:
    """As ``run``, but ranks may fail: the first that does ends the others. Return the statuses and the output."""
    with tempfile.NamedTemporaryFile("r") as file:
        environments = [clean_environment(**more, **rank) for rank in rendezvous(processes)]
        place = {"cwd": Path.cwd(), "output": Path(file.name)}
        ranks = [forked.start(script, arguments, env=env, **place) for env in environments]
        return forked.run_together(ranks, timeout), file.read()


def rendezvous(processes: int) -> list[dict[str, str]]:
    """Return the variables that torchrun gives to each rank."""
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "tests",
    }
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def _free_port() -> int:
    """Return a port below those that the system gives to others."""
    while True:
        port = random.SystemRandom().randrange(15_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
