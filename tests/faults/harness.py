"""Kill real runs of train.py at random moments, resume them, and compare what they end with to a run left in peace.

    PYTHONPATH=tests/helpers python tests/faults/harness.py --kills 200 --seed 1

A chain starts a run in a folder and with a cache of its own, kills it, resumes it from the newest checkpoint, kills it
again, and at last lets it end. A seed chooses the signals and the moments. A chain holds if

- every checkpoint that a kill left behind could be resumed, from a step at most one save interval before the kill,
- all processes of a killed run were gone within ``ALONE_S``, also where one rank of two was killed and the other asked
  to end, as torchrun does,
- its last checkpoint (weights, optimiser, schedule, loops) and its export are bitwise those of the undisturbed run,
- the metrics have every step once, and no file is left over that the undisturbed run does not leave.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import torch
from commands import ROOT, environment, text_folder
from torch import Tensor
from torchrun import rendezvous

from lit_fused.app.run_folder import metric_rows
from lit_fused.parallel.checkpoint import read_checkpoint

STEPS, SAVE_EVERY = 24, 3
RUN_S, ALONE_S = 240, 60  # for one run; for the processes that a kill left
OVERRIDES = (
    *("data=text", "data.path=../corpus", "data.vocab_size=400", "data.block_size=32", "data.batch_size=2"),
    *("model.config.hidden_size=64", "model.config.intermediate_size=96", "model.config.num_hidden_layers=2"),
    *("model.config.num_attention_heads=2", "model.config.num_key_value_heads=2"),
    "+model.config.attention_dropout=0.1",  # random numbers are a part of the state
    *(f"trainer.max_steps={STEPS}", "trainer.accumulate_grad_batches=2", "trainer.limit_val_batches=2"),
    *("trainer.val_check_interval=14", "trainer.accelerator=cpu", "callbacks.sample_text.max_new_tokens=4"),
    *(f"callbacks.checkpoint.every_n_train_steps={SAVE_EVERY}", "hydra.run.dir=out"),
)
KINDS = {
    "one process": (1, ()),
    "ddp": (2, ("strategy=ddp", "trainer.devices=2")),
    "fsdp2": (2, ("strategy=fsdp2", "trainer.devices=2")),
}
# The moment of a kill: once a file or folder of this pattern is there, or at any moment.
MOMENTS = {
    "starting": None,
    "preparing": "cache/**/*.incomplete*",  # what datasets writes
    "training": "out/checkpoints/last.ckpt*",
    "saving": "out/checkpoints/*.partial",
    "exporting": "out/exported.partial",
    "any": None,
}
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Kill:
    """One kill: what was killed, when and how; how far the run was, and from where it was resumed."""

    kind: str
    moment: str
    signal: str
    processes: str  # that got it
    seconds: float  # since the start of this attempt
    checkpoint: str  # "" if none was written yet


class PromiseError(Exception):
    """A promise that did not hold."""


def undisturbed(folder: Path, kind: str) -> dict[str, Any]:
    """Return what a run of this kind leaves if nobody kills it, and how long it takes."""
    prepare(folder)
    begun = time.monotonic()
    statuses, output = _wait(_start(folder, kind, []), RUN_S)
    if any(statuses):
        raise PromiseError(f"the undisturbed run ended with {statuses}:\n{output}")
    return left(folder) | {"seconds": time.monotonic() - begun}


def prepare(folder: Path) -> None:
    """Write the corpus of a run below ``folder``, beside the folder that the run is started in."""
    text_folder(folder)
    (folder / "run").mkdir()


def _without_memory(content: bytes) -> bytes:
    """Return a file without the row of a model card that was measured: it is another one in every run."""
    return re.sub(rb"\| peak memory \| [^|]* \|\n", b"", content)


def left(folder: Path) -> dict[str, Any]:
    """Return what a finished run has left: its state, its export, its metrics and the names of its files."""
    out = folder / "run" / "out"
    last = out / "checkpoints" / "last.ckpt"
    state = read_checkpoint(last)
    steps = [int(row["step"]) for row in metric_rows(out) if row.get("train/loss")]
    return {
        "state": {name: state[name] for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")},
        "export": {file.name: _without_memory(file.read_bytes()) for file in (out / "exported").iterdir()},
        "steps": steps,
        "status": json.loads((out / "summary.json").read_text())["status"],
        "files": {
            str(path.relative_to(folder / "run"))
            for path in (folder / "run").rglob("*")
            if not path.is_relative_to(last) and "cache" not in path.parts and path.suffix != ".log"
            if not re.fullmatch(r"metrics\.\d+\.csv", path.name)
        },
    }


def chain(folder: Path, kind: str, choices: random.Random, most: int, expected: dict[str, Any]) -> list[Kill]:
    """Kill a run up to ``most`` times and let it end. Return the kills; PromiseError if a promise did not hold."""
    prepare(folder)
    kills: list[Kill] = []
    while True:
        resumed = _resume(folder)
        scripts = _start(folder, kind, resumed)
        if len(kills) == most:
            break
        kill = _kill(folder, kind, choices, scripts, expected["seconds"], ", ".join(resumed))
        if kill is None:  # it ended before
            break
        kills.append(kill)
        _check_newest(folder, kills)
    statuses, output = _wait(scripts, RUN_S)
    if any(statuses):
        raise PromiseError(f"{kills}: the run, resumed with {resumed}, ended with {statuses}:\n{output[-4000:]}")
    found = left(folder)
    for name in expected.keys() - {"seconds"}:
        if not _same(found[name], expected[name]):
            seen = f"{found[name]} and not {expected[name]}" if name not in ("state", "export") else "other"
            if name == "export":
                seen += f": {[file for file in found[name] if found[name][file] != expected[name].get(file)]}"
            raise PromiseError(f"{kills}: after the kills, {name} is {seen}")
    return kills


def chains(
    folder: Path,
    count: int,
    seed: int,
    expected: dict[str, dict[str, Any]],
    say: Callable[[str], object] = lambda _: None,
) -> list[Kill]:
    """Kill until ``count`` kills have been, one kind of run after another; return them.

    ``expected`` has what undisturbed runs left, by kind, and gets those that it lacks.
    """
    choices, kinds = random.Random(seed), list(KINDS)
    kills: list[Kill] = []
    number = 0
    while len(kills) < count:
        kind = kinds[(seed + number) % len(kinds)]
        if kind not in expected:
            expected[kind] = undisturbed(folder / f"undisturbed {kind}", kind)
            say(f"{kind}: {expected[kind]['seconds']:.1f} s undisturbed")
        own = folder / str(number)
        kills += (new := chain(own, kind, choices, min(choices.randint(2, 6), count - len(kills)), expected[kind]))
        shutil.rmtree(own)
        for kill in new:
            say(
                f"{kill.kind}: {kill.signal} to {kill.processes}, {kill.moment}, {kill.seconds:.2f} s {kill.checkpoint}"
            )
        number += 1
    return kills


def _start(folder: Path, kind: str, more: list[str]) -> list[forked.Forked]:
    ranks, own = KINDS[kind]
    output = folder / "output.txt"
    output.write_text("")
    variables = rendezvous(ranks) if ranks > 1 else [{}]
    return [
        forked.start(
            ROOT / "train.py",
            [*OVERRIDES, *own, *more],
            cwd=folder / "run",
            env=environment(folder / "run") | variables,
            output=output,
        )
        for variables in variables
    ]


def _wait(scripts: list[forked.Forked], seconds: float) -> tuple[list[int | None], str]:
    """Wait until all processes have ended by themselves; :class:`PromiseError` if they do not."""
    deadline = time.monotonic() + seconds
    while any(script.poll() is None for script in scripts):
        if time.monotonic() > deadline:
            output = scripts[0].output.read_text()
            for script in scripts:
                script.stop()
            raise PromiseError(f"still running after {seconds} s:\n{output[-4000:]}")
        time.sleep(forked.POLL_S)
    return [script.status for script in scripts], scripts[0].output.read_text()


def _resume(folder: Path) -> list[str]:
    """Return the override that resumes from the last checkpoint; remove a run's folder that has none."""
    out = folder / "run" / "out"
    last = out / "checkpoints" / "last.ckpt"
    if last.exists() or last.with_name("last.ckpt.previous").exists():
        return ["ckpt_path=out/checkpoints/last.ckpt"]
    shutil.rmtree(out, ignore_errors=True)
    return []


def _checkpoints(folder: Path) -> Iterator[Path]:
    return (path for path in (folder / "run" / "out" / "checkpoints").glob("*.ckpt"))


def _kill(
    folder: Path, kind: str, choices: random.Random, scripts: list[forked.Forked], typical: float, resumed: str
) -> Kill | None:
    """Wait for a moment and kill one process or all; None if the run ended by itself before."""
    moment = choices.choice(list(MOMENTS))
    pattern = MOMENTS[moment]
    number, all_of_them = choices.choice(SIGNALS), choices.random() < 0.5
    wait = {"starting": choices.uniform(0, 0.3), "any": choices.random()}.get(moment, 0) * typical
    delay = choices.uniform(0, 0.004) if moment in ("saving", "exporting") else choices.uniform(0, 0.3)
    victims = scripts if all_of_them or number != signal.SIGKILL else [choices.choice(scripts)]
    begun, started = time.monotonic(), time.time()
    while True:
        if any(script.poll() is not None for script in scripts):
            return None
        if _written_since(folder / "run", pattern, started) and time.monotonic() > begun + wait:
            break
        time.sleep(0.0005 if pattern else forked.POLL_S)
    time.sleep(delay)
    seconds = time.monotonic() - begun
    kill = Kill(kind, moment, signal.Signals(number).name, f"{len(victims)} of {len(scripts)}", seconds, resumed)
    if any(script.poll() is not None for script in scripts):
        return None
    for script in scripts:
        with contextlib.suppress(ProcessLookupError):  # torchrun asks the others to end when a rank is gone
            os.killpg(script.pid, number if script in victims else signal.SIGTERM)
    try:
        _wait(scripts, ALONE_S)
    except PromiseError as broken:
        raise PromiseError(f"{kill}: {broken}") from None
    return kill


def _written_since(run: Path, pattern: str | None, started: float) -> bool:
    """Return whether this attempt has written what matches the pattern; True without one."""
    with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
        return pattern is None or any(path.stat().st_ctime > started for path in run.glob(pattern))
    return False


def _check_newest(folder: Path, kills: list[Kill]) -> None:
    """Refuse a loss of more than one save interval, by the steps that were logged."""
    metrics = folder / "run" / "out" / "metrics.csv"
    logged = max((int(row["step"]) for row in metric_rows(metrics.parent)), default=0)
    saved = max((_step(path) for path in _checkpoints(folder)), default=0)
    if saved < logged - SAVE_EVERY:
        raise PromiseError(f"{kills}: step {logged} was logged, and the newest checkpoint is of step {saved}")


def _step(path: Path) -> int:
    """Return the step of a checkpoint."""
    file = path / "meta.pt" if path.is_dir() else path
    return torch.load(file, weights_only=True)["global_step"]


def _same(one: Any, other: Any) -> bool:
    """Return whether two trees are equal, and their tensors bitwise."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill runs at random moments and check what is left.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            kills = chains(Path(folder), options.kills, options.seed, {}, lambda line: print(line, flush=True))
        except PromiseError as broken:
            sys.exit(str(broken))
    print(
        f"\n{len(kills)} kills, {time.monotonic() - begun:.0f} s, seed {options.seed}: every chain ended as undisturbed"
    )
    for title, of in (("moment", "moment"), ("run", "kind"), ("signal", "signal")):
        print(f"by {title}:", ", ".join(f"{n} {count}" for n, count in Counter(getattr(k, of) for k in kills).items()))


if __name__ == "__main__":
    main()
