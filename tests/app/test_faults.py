"""Disks that are full, files that cannot be written: one sentence, nothing half written, and how to go on."""

import errno
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra._internal.utils
import hydra.core.utils
import lightning as L
import pytest
import torch
from commands import SYNTHETIC, TINY_MODEL, train
from composed import CONF
from hydra import compose, initialize_config_dir
from lit_fused.app.continued import continue_run
from omegaconf import DictConfig
from safetensors import SafetensorError

from lit_fused.app import OutputFolderCheck
from lit_fused.app.faults import fault_of
from lit_fused.parallel.checkpoint import CheckpointFiles

JOB = [*SYNTHETIC, *TINY_MODEL, "trainer.max_steps=12", "callbacks.checkpoint.every_n_train_steps=4"]
HELPERS = Path(__file__).parents[1] / "helpers"
FULL = r"the disk is full: \S*{} could not be written whole \(\w+ .*make room"


def disk(**options: object) -> list[str]:
    options |= {"_target_": "full_disk.FullDisk"}
    return [f"+callbacks.full.{name}={value}" for name, value in options.items()]


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("fault", "sentence", "newest"),
    [
        (disk(hook="on_train_batch_start", step=7, size=20_000), r"step-000008.ckpt.partial could not be written", 4),
        slow(disk(hook="on_fit_end", size=20_000), FULL.format("report.html.*"), 12),
        (["output_dir=/dev/null/x"], r"The output folder /dev/null/x cannot be written \(Not a directory\)", None),
        slow(disk(hook="on_train_batch_end", step=6, path="out/metrics.csv"), FULL.format("metrics.csv"), 4),
        slow(disk(hook="on_train_start", size=20_000), r"step-000004.ckpt.partial could not be written whole", None),
        slow(["callbacks.export.folder=/dev/null/x"], r"/dev/null/x.partial cannot be read or written \(Not a dir", 12),
        slow(["callbacks.checkpoint.dirpath=/dev/null/x"], r"/dev/null/x cannot be read or written \(Not a dir", None),
        slow(disk(hook="on_train_batch_end", step=6, path="out"), r"out/metrics.csv cannot be .*\(No such file", None),
    ],
    ids=["checkpoint", "report", "output", "metrics", "first", "export", "dirpath", "deleted"],
)
def test_a_fault_of_a_disk_is_one_sentence_and_nothing_half_written_is_left(
    fault, sentence, newest, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")]))
    finished = train(tmp_path, *JOB, *fault, "~callbacks.sample_text", "hydra.run.dir=out")
    assert finished.status == 1, finished.output
    assert len(re.findall(sentence, finished.plain)) == 1, finished.output
    assert "Traceback" not in finished.output
    assert not [path for path in tmp_path.rglob("*") if ".partial" in path.name or ".html." in path.name]
    hint = re.search(r"Resume with: \S+python .*ckpt_path=(\S+)", finished.plain)
    assert bool(hint) == bool(newest)
    if hint is not None:
        assert torch.load(hint[1], weights_only=True)["global_step"] == newest


@contextmanager
def as_nobody() -> Iterator[None]:
    """Have the permissions of another user, to whom the folders of tests are closed."""
    if not hasattr(os, "seteuid") or os.geteuid() != 0:
        pytest.skip("only root can be another user")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_checkpoint_or_folder_of_another_user_is_one_sentence_that_names_it(tmp_path, monkeypatch):
    closed = tmp_path / "closed"
    (closed / "run" / "checkpoints").mkdir(parents=True)
    closed.chmod(0o700)
    monkeypatch.setattr("sys.argv", ["train.py", f"ckpt_path={closed}/run/checkpoints/last.ckpt"])
    with as_nobody(), pytest.raises(SystemExit) as ended:
        continue_run(CONF, "train")
    assert re.fullmatch(rf"{closed}/\S+ cannot be read or written \(Permission denied\); .*", str(ended.value.code))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", [f"hydra.run.dir={closed}/out"], return_hydra_config=True)
    config.hydra.runtime.cwd = str(tmp_path)
    with as_nobody(), pytest.raises(SystemExit) as ended:
        OutputFolderCheck().on_run_start(config)
    assert re.search(rf"{closed}/\S+ cannot be [^\n]*Permission denied", str(ended.value.code))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "x"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        Exception("No space left on device (os error 28)"),  # tokenizers
    ],
)
def test_a_full_disk_is_recognised_in_the_words_of_each_library(error):
    assert "the disk is full: " in str(fault_of(error))
    outer = RuntimeError("while saving")
    outer.__cause__ = error
    assert "the disk is full: " in str(fault_of(outer))


def test_the_first_rank_alone_writes_what_hydra_writes(monkeypatch, tmp_path):
    """It moves and deletes the folder of a run that is resumed, in which another rank would write."""
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        hydra.core.utils._save_config(DictConfig({"seed": 1}), "config.yaml", tmp_path / "resumed")
        assert (tmp_path / "resumed").exists() == (rank == "0")
    assert [path.name for path in (tmp_path / "resumed").iterdir()] == ["config.yaml"]


def test_a_worker_of_a_launcher_leaves_no_half_of_a_configuration(tmp_path):
    program = f"""
import resource, sys, pathlib, pickle, hydra.core.utils
pickle.loads({pickle.dumps(OutputFolderCheck())})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
from hydra.core.utils import _save_config
from omegaconf import OmegaConf
_save_config(OmegaConf.create(dict(a=5000 * "a")), "config.yaml", pathlib.Path(sys.argv[1]))
"""
    finished = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert "File too large" in finished.stderr
    assert not any(tmp_path.iterdir())


def test_errors_that_are_no_faults_of_a_disk_keep_their_traces():
    assert fault_of(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert fault_of(KeyError("momentum")) is None
    assert fault_of(KeyboardInterrupt()) is None


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before_it(tmp_path):
    plugin, path = CheckpointFiles(L.Trainer(accelerator="cpu", logger=False)), tmp_path / "last.ckpt"
    plugin.save_checkpoint({"weights": torch.ones(3)}, path)
    with pytest.raises(AttributeError):
        plugin.save_checkpoint({"weights": lambda: None}, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]
