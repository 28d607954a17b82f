"""The launcher of the distributed tests: call a function of a test's file on several ranks."""

import inspect
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torchrun import HELPERS, run_whatever_comes, torchrun

from lit_fused import UserError
from lit_fused.parallel.collectives import objects_of_ranks


class Counted(TorchDispatchMode):
    """Counts the operators whose names have one of these words."""

    def __init__(self, *words: str) -> None:
        super().__init__()
        self.words, self.count = words, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(word in str(func) for word in self.words)
        return func(*args, **(kwargs or {}))


class Refusal(str):
    """The message of a UserError that a case has raised."""

    __slots__ = ()


def each(function: Callable[..., Any], processes: int, cases: Iterable[Any], *given: Any, timeout: float = 300) -> Any:
    """Call ``function(case, *given)`` for one case after the other, on all ranks together.

    Returns:
        what the first rank returns, by case; a :class:`Refusal` for a UserError, which all ranks have to raise in the
        same words.
    """
    return call(_each, processes, function, [*cases], given, timeout=timeout)[0]


def or_refusal(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except UserError as refusal:
        return Refusal(refusal)


def _each(rank: int, function: Callable[..., Any], cases: list[Any], given: Sequence[Any]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for case in cases:
        result = or_refusal(partial(function, case, *given))
        if dist.is_initialized():
            said = objects_of_ranks(str(result) if isinstance(result, Refusal) else "")
            assert len({*said}) == 1, (case, said)
        found[case] = result if rank == 0 else None
    return found


def call(function: Callable[..., Any], processes: int, *given: Any, timeout: float) -> list[Any]:
    """Call ``function(rank, *given)`` in as many processes; return what each rank returns. All must succeed."""
    with tempfile.TemporaryDirectory() as folder:
        statuses, output = _run(Path(folder), function, processes, given, timeout)
        assert {*statuses} == {0}, output[-6000:]
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(processes)]


def statuses_of(function: Callable[..., Any], processes: int, *given: Any, timeout: float) -> list[int | None]:
    """As ``call``, but ranks may fail, of which the first ends the others; return the exit status of each."""
    with tempfile.TemporaryDirectory() as folder:
        return _run(Path(folder), function, processes, given, timeout)[0]


def _run(
    folder: Path, function: Callable[..., Any], processes: int, given: Sequence[Any], timeout: float
) -> tuple[list[int | None], str]:
    (folder / "call").write_bytes(pickle.dumps((function, given)))
    tests = {str(Path(inspect.getfile(f)).parent) for f in (function, *given) if inspect.isfunction(f)}
    path = os.pathsep.join([HELPERS, *tests, os.environ.get("PYTHONPATH", "")])
    if 1 < processes <= torch.cuda.device_count():
        # A process that has looked for GPUs cannot be forked into ranks that use them.
        status, output = torchrun(__file__, processes, folder, timeout=timeout, PYTHONPATH=path)
        return [status], output
    return run_whatever_comes(__file__, processes, folder, timeout=timeout, PYTHONPATH=path)


if __name__ == "__main__":
    FOLDER, RANK = Path(sys.argv[1]), int(os.environ["RANK"])
    called, arguments = pickle.loads((FOLDER / "call").read_bytes())
    torch.save(called(RANK, *arguments), FOLDER / f"{RANK}.pt")
    if dist.is_initialized():
        dist.barrier()
    # Without the interpreter's teardown, in which gloo's threads now and then abort a process that has done its work
    # ("terminate called without an active exception").
    sys.stdout.flush()
    os._exit(0)
