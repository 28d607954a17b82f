"""The command line as tests run it: a tiny model, small data, and ``train.py`` in a process of its own."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
from torchrun import clean_environment, rendezvous

ROOT = Path(__file__).parents[2]

TINY_MODEL = [
    "model.config.hidden_size=16",
    "model.config.intermediate_size=24",
    "model.config.num_hidden_layers=1",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=2",
]

SYNTHETIC = [
    "data=synthetic",
    "data.vocab_size=300",
    "data.block_size=32",
    "data.batch_size=4",
    "data.num_train_batches=8",
    "data.num_val_batches=2",
]

TIMEOUT_S = 240


@dataclass
class Finished:
    status: int | None
    output: str

    @property
    def plain(self) -> str:
        """The output on one line, without the borders of tables and panels."""
        return re.sub(r"[\s│╭╮╰╯─]+", " ", self.output)


def command(*overrides: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *overrides]


def environment(folder: Path) -> dict[str, str]:
    """On the CPU, also where there is a GPU, with a cache of its own."""
    return clean_environment(XDG_CACHE_HOME=str(folder / "cache"), COLUMNS="100", CUDA_VISIBLE_DEVICES="")


def train(folder: Path, *overrides: str, ranks: int = 1, status: int | None = 0) -> Finished:
    """Run train.py in ``folder``, in processes that are forked (see ``forked.py``): as by torchrun if several."""
    return run_forked(ROOT / "train.py", folder, overrides, rendezvous(ranks) if ranks > 1 else [{}], status)


def export(folder: Path, *arguments: object, status: int = 0) -> Finished:
    """Run ``python -m lit_fused.export`` in ``folder``, in a process that is forked."""
    return run_forked(ROOT / "lit_fused" / "export" / "__main__.py", folder, arguments, status=status)


def run_forked(
    script: Path,
    folder: Path,
    arguments: Sequence[object],
    variables: Sequence[Mapping[str, str]] = ({},),
    status: int | None = 0,
) -> Finished:
    """Run a script in forked processes, once for each of ``variables`` of the environment, side by side.

    ``status`` is the exit status that the run must have, ``None`` for any.
    """
    with tempfile.NamedTemporaryFile("r") as output:
        scripts = [
            forked.start(script, arguments, cwd=folder, env=environment(folder) | more, output=Path(output.name))
            for more in map(dict, variables)
        ]
        statuses = forked.run_together(scripts, TIMEOUT_S)
        return ended(next(filter(None, statuses), statuses[0]), output.read(), status)


def ended(status: int | None, output: str, wanted: int | None) -> Finished:
    assert wanted is None or status == wanted, f"exit status {status} and not {wanted}:\n{output}"
    return Finished(status, output)


def train_anew(folder: Path, *overrides: str, status: int | None = 0, **variables: str) -> Finished:
    """Run train.py in ``folder`` as a user does, in a new Python, with further environment variables."""
    done = subprocess.run(
        command(*overrides),
        cwd=folder,
        env=environment(folder) | variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT_S,
    )
    return ended(done.returncode, done.stdout, status)


def summary(folder: Path) -> dict[str, Any]:
    """Return what a run has left in its summary.json."""
    return json.loads((folder / "summary.json").read_text())


def text_folder(folder: Path) -> Path:
    """A small corpus that is the same whatever becomes of the project: tables of products in words."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    for a in range(1, 21):
        lines = (f"{a} times {b} is {a * b}, and {b} more than that is {a * b + b}.\n" for b in range(1, 61))
        (corpus / f"table_of_{a}.txt").write_text("".join(lines))
    return corpus
