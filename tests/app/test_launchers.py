"""One command, the same numbers, whoever starts its processes: Lightning, torchrun, SLURM or a sweep's launcher."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from commands import ROOT, SYNTHETIC, TIMEOUT_S, TINY_MODEL, Finished, command, environment, run_forked, summary, train
from hydra import compose, initialize_config_dir
from torchrun import COMMAND

from lit_fused.app.run_folder import metric_rows

JOB = [*SYNTHETIC, *TINY_MODEL, "callbacks=measure", "strategy=fsdp2", "trainer.devices=2", "trainer.accelerator=cpu"]
STEPS = ["trainer.max_steps=3", "trainer.enable_checkpointing=false"]


def numbers(folder: Path) -> dict[str, float]:
    """The losses of a finished run."""
    metrics = summary(folder)["metrics"]
    return {name: metrics[name] for name in ("train/loss", "val/loss", "val/accuracy")}


def finish(processes: list[subprocess.Popen]) -> str:
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)[-6000:]
    return "\n".join(outputs)


def start(arguments: list[str], folder: Path, *, session: bool = False, **more: str) -> subprocess.Popen:
    return subprocess.Popen(
        arguments,
        start_new_session=session,
        cwd=folder,
        env=environment(folder) | more,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def slurm_job() -> dict[str, Any]:
    """Return what ``sbatch`` tells a job of two tasks on one node."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return {
        "SLURM_JOB_ID": "4321",
        "SLURM_JOB_NAME": "lit_fused",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def as_slurm_tasks(folder: Path, *overrides: str) -> Finished:
    """Two processes with the environment that ``srun`` gives them."""
    job = slurm_job()
    tasks = [job | {"SLURM_PROCID": task, "SLURM_LOCALID": task} for task in ("0", "1")]
    return run_forked(ROOT / "train.py", folder, overrides, tasks)


@pytest.mark.slow
@pytest.mark.timeout(4 * TIMEOUT_S)
def test_lightning_torchrun_and_slurm_start_the_same_job(tmp_path):
    job = [*JOB, *STEPS]
    train(tmp_path, *job, "hydra.run.dir=own")  # This one starts the second process, a new Python.
    finish([start([*COMMAND, "2", str(ROOT / "train.py"), *job, "hydra.run.dir=torchrun"], tmp_path)])
    slurm = as_slurm_tasks(tmp_path, *job, "hydra.run.dir=slurm")
    assert numbers(tmp_path / "own") == numbers(tmp_path / "torchrun") == numbers(tmp_path / "slurm")
    assert slurm.output.count("Results") == 1  # one report, of rank zero


SRUN = """#!/bin/sh
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" &
second=$!
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" &
echo $! $second > tasks
wait $!
wait $second
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A folder with the project, and with an ``srun`` that starts two tasks and a ``scontrol`` that keeps a log."""
    for name in ("train.py", "conf"):
        (tmp_path / name).symlink_to(ROOT / name)
    tools = {"bin/srun": SRUN, "bin/scontrol": '#!/bin/sh\necho "$@" > requeues\n', ".venv/bin/activate": ""}
    for name, text in tools.items():
        tool = tmp_path / name
        tool.parent.mkdir(parents=True, exist_ok=True)
        tool.write_text(text)
        tool.chmod(0o755)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_the_example_for_sbatch_is_requeued_before_its_limit_and_goes_on_with_the_next_step(cluster):
    small = [*SYNTHETIC, *TINY_MODEL, "trainer.accelerator=cpu", "callbacks.checkpoint.every_n_train_steps=5"]
    script = ["bash", str(ROOT / "examples/slurm/train.sbatch"), *small, "~callbacks.export"]
    path = f"{cluster / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job: dict[str, Any] = slurm_job() | {"PATH": path}
    run = cluster / "outputs/4321"

    first = start([*script, "trainer.max_steps=100000"], cluster, **job, session=True)
    try:
        wait_for(run / "checkpoints/last.ckpt")
        os.kill(int((cluster / "tasks").read_text().split()[1]), signal.SIGUSR1)  # SLURM sends it to all
        first.communicate(timeout=TIMEOUT_S)
    finally:
        os.killpg(first.pid, signal.SIGKILL) if first.poll() is None else None
    assert (cluster / "requeues").read_text() == "requeue 4321\n"
    reached = steps_of(run / "checkpoints/last.ckpt")
    assert f"stopped by SIGUSR1 at step {reached}" in (run / "error.txt").read_text()

    again = start([*script, f"trainer.max_steps={reached + 2}"], cluster, **job, SLURM_RESTART_COUNT="1")
    finish([again])
    assert steps_of(run / "checkpoints/last.ckpt") == reached + 2
    steps = [int(row["step"]) for row in metric_rows(run) if row.get("train/loss")]
    assert steps == list(range(reached + 2)), "it began anew, or a step is missing or there twice"


@pytest.mark.slow
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_a_preempted_job_of_submitit_is_requeued_and_ends_with_the_numbers_of_one_that_was_not(tmp_path):
    job = [*SYNTHETIC, *TINY_MODEL, "callbacks=measure", "trainer.accelerator=cpu"]
    job += ["+callbacks.checkpoint._target_=lit_fused.callbacks.RunCheckpoint", "trainer.max_steps=40"]
    job += ["+callbacks.checkpoint.every_n_train_steps=5", "+callbacks.checkpoint.dirpath=${output_dir}/checkpoints"]
    slow = "+callbacks.slow={_target_: slow_steps.SlowSteps, seconds: 0.2}"
    train(tmp_path, *job, "hydra.run.dir=whole")
    sweep = command("-m", "hydra/launcher=submitit_local", "hydra.sweep.dir=sweep", *job, slow)
    process = start(sweep, tmp_path, PYTHONPATH=f"{ROOT}:{ROOT / 'tests/helpers'}")
    last = tmp_path / "sweep/0/checkpoints/last.ckpt"
    wait_for(last)
    [task] = [p for p in psutil.Process(process.pid).children(recursive=True) if "submitit.core._submit" in p.cmdline()]
    task.send_signal(signal.SIGUSR2)
    finish([process])
    logs = "".join(path.read_text() for path in (tmp_path / "sweep").rglob("*_log.*"))
    assert "Requeued job" in logs
    assert logs.count("Restored all states") == 1, "it went on, once"
    assert numbers(tmp_path / "sweep/0") == numbers(tmp_path / "whole")
    rows = metric_rows(tmp_path / "sweep/0")
    assert [row["step"] for row in rows if row.get("train/loss")] == [str(step) for step in range(40)]
    assert (tmp_path / "sweep/0/metrics.1.csv").exists(), "it went on in its folder"


def wait_for(path: Path) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < end, f"there is no {path.name}"
        time.sleep(0.2)


def steps_of(checkpoint: Path) -> int:
    return torch.load(checkpoint / "meta.pt", weights_only=False)["global_step"]


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_a_sweep_runs_its_jobs_through_submitit(tmp_path):
    job = [*SYNTHETIC, *TINY_MODEL, *STEPS, "callbacks=measure", "trainer.accelerator=cpu"]
    sweep = ["-m", "hydra/launcher=submitit_local", "hydra.sweep.dir=sweep", "loss=standard,chunked"]
    train(tmp_path, *sweep, *job)
    losses = [numbers(tmp_path / "sweep" / run)["val/loss"] for run in ("0", "1")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert (tmp_path / "sweep" / "report.md").exists()


def test_slurm_starts_one_task_for_every_device():
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        overrides = ["hydra/launcher=slurm", "trainer.devices=4", "trainer.num_nodes=2", "hydra.launcher.partition=gpu"]
        config = compose("train", overrides, return_hydra_config=True)
    resolved = {name: config.hydra.launcher[name] for name in ("nodes", "tasks_per_node", "gpus_per_node", "partition")}
    assert resolved == {"nodes": 2, "tasks_per_node": 4, "gpus_per_node": 4, "partition": "gpu"}
