"""The processes of a run end together, soon, and with one sentence."""

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from commands import SYNTHETIC, TIMEOUT_S, TINY_MODEL, command, environment, train_anew

from lit_fused.app import ranks
from lit_fused.app.reporting.page import write_report

JOB = [*SYNTHETIC, *TINY_MODEL, "trainer.accelerator=cpu", "~callbacks.sample_text"]


def in_fork(work: Callable[[], None]) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=lambda: (work(), time.sleep(60)))
    process.start()
    return process  # pyright: ignore[reportReturnType]


def test_a_process_ends_soon_after_the_one_that_started_it(tmp_path):
    def start_another() -> None:
        if not os.fork():
            ranks.end_with_parent()
            tmp_path.joinpath(str(os.getpid())).touch()
            time.sleep(60)

    starter = in_fork(start_another)
    wait_until(lambda: any(tmp_path.iterdir()))
    pid = int(next(tmp_path.iterdir()).name)
    time.sleep(0.2)
    assert psutil.pid_exists(pid)
    starter.kill()
    starter.join()
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def wait_until(fact: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_jobs_of_a_parallel_sweep_end_when_the_sweep_is_ended(how, tmp_path):
    sweep = ["-m", "hydra/launcher=parallel", "hydra.launcher.n_jobs=2", "seed=1,2,3", "hydra.sweep.dir=sweep"]
    endless = ["trainer.max_steps=100000", "data.num_train_batches=5000", "callbacks.checkpoint.every_n_train_steps=10"]
    process = subprocess.Popen(
        command(*sweep, *JOB, *endless),
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: len(list(tmp_path.glob("sweep/*/checkpoints/last.ckpt"))) == 2, TIMEOUT_S)
        jobs = psutil.Process(process.pid).children(recursive=True)
        assert len(jobs) >= 2
    finally:
        process.send_signal(how)
    gone, left = psutil.wait_procs(jobs, timeout=60)
    for job in left:
        job.kill()
    process.wait(20)
    assert not left
    assert gone
    assert "; resume it with ckpt_path=" in write_report(tmp_path / "sweep")


@pytest.mark.slow
def test_a_mistake_under_two_ranks_is_one_sentence(tmp_path: Path):
    finished = train_anew(tmp_path, *JOB, "strategy=pp", "trainer.devices=2", status=1)
    assert finished.plain.count("2 pipeline stages need at least as many layers") == 1, finished.output
    assert "Traceback" not in finished.output
