"""Run the cases of a distributed test on each of its ranks, and save what rank 0 has found."""

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lit_fused import UserError
from lit_fused.parallel.collectives import objects_of_ranks


def or_refusal(run: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a run returns, or the words with which it is refused."""
    try:
        return run(*arguments)
    except UserError as refusal:
        return {"refusal": str(refusal)}


class Counted(TorchDispatchMode):
    """Counts the operators whose names have one of these words."""

    def __init__(self, *words: str) -> None:
        super().__init__()
        self.words, self.count = words, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(word in str(func) for word in self.words)
        return func(*args, **(kwargs or {}))


def run_cases(run: Callable[[str], Any], cases: Iterable[str], file_of: Callable[[str], Path]) -> None:
    """Run cases on this rank, all ranks together; rank 0 saves each result that is not None. It ends the process."""
    for case in cases:
        result = run(case)
        if os.environ["RANK"] == "0" and result is not None:
            file_of(case).parent.mkdir(exist_ok=True, parents=True)
            torch.save(result, file_of(case))
        if dist.is_initialized():
            dist.barrier()
    # Without the interpreter's teardown, in which gloo's threads now and then abort a process that has done its work
    # ("terminate called without an active exception").
    sys.stdout.flush()
    os._exit(0)


def run_command(run: Callable[[str, Path], Any]) -> None:
    """Run the cases of a job's command line, its folder and then ``what:strategy``; a refusal is a result as well, in
    the same words on all ranks."""
    folder = Path(sys.argv[1])

    def result(case: str) -> Any:
        found = or_refusal(run, case, folder)
        if isinstance(found, dict) and "refusal" in found and dist.is_initialized():
            assert len({*objects_of_ranks(found["refusal"])}) == 1
        return found

    run_cases(result, sys.argv[2:], lambda case: folder / f"{case.replace(':', '_')}.pt")
