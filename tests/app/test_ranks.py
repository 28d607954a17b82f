"""The processes of a run end together, soon, and with one sentence."""

import multiprocessing
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import forked
import psutil
import pytest
from commands import ROOT, SYNTHETIC, TINY_MODEL, command, environment, train_anew
from torchrun import rendezvous

from lit_fused import UserError
from lit_fused.app import ranks

JOB = [*SYNTHETIC, *TINY_MODEL, "trainer.accelerator=cpu", "~callbacks.sample_text"]
SAID = "MASTER_PORT={} cannot be used (Address already in use); set it to a free one, or leave it unset"


@pytest.fixture
def busy_port() -> Iterator[str]:
    with socket.create_server(("", 0)) as server:
        yield str(server.getsockname()[1])


def test_a_port_that_is_in_use_ends_the_run_before_it_starts_other_ranks(busy_port, tmp_path):
    start = time.monotonic()
    finished = train_anew(tmp_path, *JOB, "strategy=ddp", "trainer.devices=2", MASTER_PORT=busy_port)
    assert finished.status == 1
    assert finished.plain.count(SAID.format(busy_port)) == 1, finished.output
    assert "Traceback" not in finished.output
    assert time.monotonic() - start < 30


def test_only_a_port_at_which_this_process_has_to_listen_is_tried(busy_port, monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    ranks.check_port()
    for port, said in ((busy_port, "Address already in use"), ("x", "no number of a port"), ("70000", "no number")):
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(UserError, match=rf"MASTER_PORT={port} cannot be used \({said}"):
            ranks.check_port()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")  # torchrun listens
    ranks.check_port()


def in_fork(work: Callable[[], None]) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=lambda: (work(), time.sleep(60)))
    process.start()
    return process  # pyright: ignore[reportReturnType]


def test_a_rank_ends_after_another_has_written_why_it_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "_GRACE_SECONDS", 0.1)
    error = tmp_path / "error.txt"
    error.write_text("of an earlier run")
    os.utime(error, (1, 1))
    rank = in_fork(lambda: ranks.end_with_run(error))
    rank.join(1.5)
    assert rank.is_alive()
    error.write_text("of this run")
    rank.join(10)
    assert rank.exitcode == 1


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "number"), [("0", signal.SIGINT), ("1", signal.SIGTERM)])
def test_a_rank_that_waits_for_another_ends_when_it_is_asked_to(rank, number, tmp_path):
    output = tmp_path / "output.txt"
    output.touch()
    meeting = rendezvous(2)[int(rank)]
    run = forked.start(
        ROOT / "train.py",
        [*JOB, "strategy=ddp", "trainer.devices=2"],
        cwd=tmp_path,
        env=environment(tmp_path) | meeting,
        output=output,
    )
    try:
        wait_until(lambda: "Initializing distributed" in output.read_text(), 60)
        time.sleep(0.5)  # it waits for the other one, in C++
        os.kill(run.pid, number)
        wait_until(lambda: run.poll() is not None, 30)
    finally:
        run.stop()
    assert run.status == 128 + number


def jobs_in_forks(folder: Path, *delays: float) -> None:
    """Run as a sweep's launcher: fork a job for each delay, which saves so long after SIGTERM, and kill all at the end,
    as joblib does when it is interrupted or one of its jobs is."""
    marks = folder / "marks"
    marks.mkdir()
    jobs, pids = ranks.SideBySide(marks), []
    jobs.listen()
    for delay in delays:
        pids.append(os.fork())
        if not pids[-1]:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _save_when_asked(folder, delay, jobs)
    try:
        time.sleep(30)
    except KeyboardInterrupt:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        folder.joinpath("interrupted").touch()


def _save_when_asked(folder: Path, delay: float, jobs: ranks.SideBySide) -> None:
    def save(*_: object) -> None:
        time.sleep(delay)
        folder.joinpath(f"saved-{os.getpid()}").write_text("whole")
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, save)
    jobs.begin()
    folder.joinpath(f"runs-{os.getpid()}").touch()
    try:
        time.sleep(30)
    finally:
        ranks.end_if_asked()


def of_jobs(folder: Path, what: str) -> list[int]:
    return [int(path.name.removeprefix(what)) for path in folder.glob(f"{what}*")]


def test_a_job_gets_sigterm_when_its_launcher_is_gone_and_ends_when_it_has_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "_SAVING_SECONDS", 60)
    process = in_fork(lambda: jobs_in_forks(tmp_path, 0))
    wait_until(lambda: len(of_jobs(tmp_path, "runs-")) == 1)
    [pid] = of_jobs(tmp_path, "runs-")
    process.kill()
    process.join()
    wait_until(lambda: not psutil.pid_exists(pid) or is_zombie(pid))
    assert of_jobs(tmp_path, "saved-") == [pid]
    assert not (tmp_path / "marks").exists(), "nothing is left behind"


@pytest.mark.parametrize("who", ["launcher", "job"])
def test_jobs_that_run_side_by_side_have_all_saved_when_their_launcher_is_interrupted(who, tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "_POLL_SECONDS", 0.05)
    process = in_fork(lambda: jobs_in_forks(tmp_path, 0, 2))
    wait_until(lambda: len(of_jobs(tmp_path, "runs-")) == 2)
    pids = sorted(of_jobs(tmp_path, "runs-"))  # The first of them saves at once.
    os.kill(pids[0] if who == "job" else process.pid or 0, signal.SIGTERM if who == "job" else signal.SIGINT)
    try:
        wait_until(lambda: (tmp_path / "interrupted").exists())
        assert sorted(of_jobs(tmp_path, "saved-")) == pids
    finally:
        process.kill()
        process.join()


def is_zombie(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_until(fact: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
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
        wait_until(lambda: len(list(tmp_path.glob("sweep/*/checkpoints/last.ckpt"))) == 2, 200)
        jobs = psutil.Process(process.pid).children(recursive=True)
        assert len(jobs) >= 2
    finally:
        process.send_signal(how)
    gone, left = psutil.wait_procs(jobs, timeout=20)
    for job in left:
        job.kill()
    process.wait(20)
    assert not left
    assert gone
    assert how == signal.SIGKILL or len(list(tmp_path.glob("sweep/*/error.txt"))) == 2, "both said where to resume"


@pytest.mark.slow
def test_a_mistake_under_two_ranks_is_one_sentence(tmp_path: Path):
    finished = train_anew(tmp_path, *JOB, "strategy=pp", "trainer.devices=2")
    assert finished.status == 1
    assert finished.plain.count("2 pipeline stages need at least as many layers") == 1, finished.output
    assert "Traceback" not in finished.output
