"""Run Python scripts in processes of their own without importing torch again for each.

A test process forks one server before it imports the tests (``conftest.py``). The server forks once for each script.
A forked script has its own arguments, folder, environment, output, process group and exit status; it runs as
``__main__``, as under ``python``.

Libraries read some variables when they are imported (HF_HOME, HF_ENDPOINT, TRITON_INTERPRET): a script that needs
other values of these than the tests have must be started by ``subprocess``.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import logging
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "lightning.pytorch",
    "transformers.models.llama.modeling_llama",
    "transformers.generation.utils",
    "hydra.main",
    "lit_fused.app.cli",
    "lit_fused.app.commands.training",
    "lit_fused.app.launching",
    "lit_fused.app.reporting.finish",
    "lit_fused.callbacks",
    "lit_fused.data.synthetic",
    "lit_fused.data.token_data_module",
    "lit_fused.training",
)
POLL_S = 0.02


class Forked:
    """One script that was started, with its output in a file."""

    def __init__(self, pid: int, output: Path) -> None:
        self.pid = pid
        self.output = output
        self.status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None while the script runs."""
        if self.status is None:
            self.status = _ask("poll", self.pid)
        return self.status

    def stop(self) -> None:
        """End the script and every process of its group."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            while self.poll() is None:
                time.sleep(POLL_S)


def start(
    script: str | Path, arguments: Sequence[object], *, cwd: Path, env: Mapping[str, str], output: Path
) -> Forked:
    """Fork a process that runs ``script``; stdout and stderr are appended to the file ``output``."""
    job = {"script": str(script), "arguments": [*map(str, arguments)], "cwd": str(cwd), "env": dict(env)}
    return Forked(_ask("start", job | {"output": str(output)}), output)


def run_together(scripts: Sequence[Forked], timeout: float) -> list[int | None]:
    """Wait until all have ended; after the first failure, or after ``timeout`` seconds, end the others."""
    deadline = time.monotonic() + timeout
    try:
        while (statuses := [script.poll() for script in scripts]).count(None):
            if any(statuses):
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"still running after {timeout} s:\n{scripts[0].output.read_text()[-6000:]}")
            time.sleep(POLL_S)
    finally:
        for script in scripts:
            script.stop()
    return statuses


_server: tuple[TextIO, TextIO] | None = None  # requests to it, and its answers


@functools.cache
def preload() -> None:
    """Import what the scripts do, and fill the tables that each process would make once: the grammars of Hydra's
    parsers, the signatures that a configuration is compared with, transformers' names of weights."""
    for module in PRELOADED:
        importlib.import_module(module)
    from hydra import compose, initialize_config_dir
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from lit_fused.app.commands import MODES
    from lit_fused.app.config import check_config

    with initialize_config_dir(str(Path(__file__).parents[2] / "conf"), version_base="1.3"):
        hydras_own = ["output_dir=."]  # known in a run alone
        check_config(compose("train", hydras_own), MODES)
    get_checkpoint_conversion_mapping("llama")


def start_server() -> None:
    """Fork the server, if there is none. Nothing may have run before that starts threads."""
    global _server
    if _server is not None:
        return
    (requests, to_server), (from_server, answers) = os.pipe(), os.pipe()
    if os.fork():
        os.close(requests)
        os.close(answers)
        _server = os.fdopen(to_server, "w"), os.fdopen(from_server)
        return
    os.close(to_server)
    os.close(from_server)
    gc.freeze()  # A collection in a forked process looks at the objects of that process only.
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # temporary folders of the tests
    os.setsid()  # Ctrl-C is the test process's.
    try:
        if (mine := _serve(os.fdopen(requests), os.fdopen(answers, "w"))) is not None:
            _become(mine)
    finally:
        os._exit(1)


def _ask(what: str, value: object) -> Any:
    start_server()
    assert _server is not None
    requests, answers = _server
    requests.write(json.dumps([what, value]) + "\n")
    requests.flush()
    return json.loads(answers.readline())


def _serve(requests: TextIO, answers: TextIO) -> dict[str, Any] | None:
    """Answer requests until they end. Return the job in a forked process, and None in the server."""
    running: set[int] = set()
    for line in requests:
        what, value = json.loads(line)
        answer: int | None
        if what == "start":
            preload()
            answer = os.fork()
            if answer == 0:
                requests.close()
                answers.close()
                return value
            running.add(answer)
        else:
            pid, waited = os.waitpid(value, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(waited) if pid else None
            running.discard(pid)
        print(json.dumps(answer), file=answers, flush=True)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return None


def _as_a_new_python() -> None:
    """Take back what pytest has changed: streams, and handlers of logs and of signals."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115
    logging.root.handlers.clear()
    for logger in logging.root.manager.loggerDict.values():
        for handler in getattr(logger, "handlers", ()):
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _become(job: dict[str, Any]) -> NoReturn:
    """Run the job's script and end as Python ends, without the last collection of all that was imported."""
    os.setsid()
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    written = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (written, 1), (written, 2)):
        os.dup2(source, target)
    _as_a_new_python()
    sys.argv = [job["script"], *job["arguments"]]
    sys.path.insert(0, str(Path(job["script"]).parent))
    for folder in reversed(job["env"].get("PYTHONPATH", "").split(os.pathsep)):
        if folder and folder not in sys.path:
            sys.path.insert(1, folder)
    status = 0
    try:
        runpy.run_path(job["script"], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # typeshed omits it; Python itself ends with these two
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
