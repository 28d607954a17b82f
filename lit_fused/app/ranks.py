"""Know which of a run's processes this is and of which job, and end it with the process that started it."""

import os
import threading
import time
from functools import cache

_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")  # torchrun, Lightning and SLURM set them.
_POLL_SECONDS = 0.5


def is_first_rank() -> bool:
    """Return whether no launcher has started this process as a further rank of a run."""
    return all(os.environ.get(name, "0") in ("0", "") for name in _RANKS)


def job_of_cluster() -> str | None:
    """Return the number of the job of SLURM, or of submitit's local executor, in which this process runs."""
    return os.environ.get("SUBMITIT_LOCAL_JOB_ID") or os.environ.get("SLURM_JOB_ID")


def may_be_requeued() -> bool:
    """Return whether this process may be another attempt of its job."""
    return "SUBMITIT_LOCAL_JOB_ID" in os.environ or os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


@cache
def end_with_parent() -> None:
    """End this process soon after the one that started it: a rank may wait for the others for half an hour, in C++,
    where it can neither be interrupted nor learn that they are gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end-with-parent").start()
