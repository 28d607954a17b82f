"""Sweeps beyond one run after another: side by side with joblib, and searches by Optuna; what a run returns to them."""

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import SYNTHETIC, TINY_MODEL, train
from omegaconf import OmegaConf

from lit_fused.app import launching
from lit_fused.app.reporting.runs import read_runs

JOB = [*SYNTHETIC, *TINY_MODEL, "trainer.max_steps=3", "callbacks=measure", "trainer.enable_checkpointing=false"]


@pytest.mark.slow
def test_joblib_runs_jobs_side_by_side_and_ends_with_one_report(tmp_path):
    sweep = [
        "-m",
        "hydra/launcher=parallel",
        "hydra.launcher.n_jobs=2",
        "loss=standard,chunked",
        "hydra.sweep.dir=sweep",
    ]
    meeting = {"_target_": "meeting.Meeting", "folder": tmp_path / "meeting", "processes": 2}
    train(tmp_path, *sweep, *JOB, *(f"+callbacks.meeting.{key}={value}" for key, value in meeting.items()))
    found = read_runs(tmp_path / "sweep")
    assert [run.overrides["loss"] for run in found if run.status == "completed"] == ["standard", "chunked"]
    assert found[0].metrics["val/loss"] == pytest.approx(found[1].metrics["val/loss"], rel=1e-5)


@pytest.mark.slow
def test_optuna_searches_and_goes_on_after_a_trial_that_fails(tmp_path):
    search = ["-m", "hydra/sweeper=search", "hydra.sweeper.n_trials=3", "hydra/sweeper/sampler=grid"]
    space = ["loss=choice(liger,chunked)", "optimizer.lr=choice(1e-1,1e-5)"]  # liger needs a GPU
    kept = ["hydra.sweeper.storage=sqlite:///study.db", "hydra.sweeper.study_name=s"]
    train(tmp_path, *search, *space, *kept, *JOB, "hydra.sweep.dir=sweep")
    runs = read_runs(tmp_path / "sweep")
    assert len(runs) == 3
    failed = [run for run in runs if run.status == "failed"]
    assert failed
    assert all(run.overrides["loss"] == "liger" and "CUDA" in run.error for run in failed)
    best = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())
    losses = [run.metrics["val/loss"] for run in runs if run.status == "completed"]
    assert best["best_value"] == pytest.approx(min(losses))
    assert "CUDA" in (tmp_path / "sweep" / "report.html").read_text()
    assert (tmp_path / "study.db").stat().st_size > 0


def hold(count: int, folder: Path, answer: Connection) -> None:
    answer.send(launching.claim(folder, ["0", "1", "2", "3", "4"], count, poll_seconds=0.05))
    time.sleep(60)


def test_every_process_has_gpus_of_its_own_and_waits_for_those_of_others(tmp_path):
    forking = multiprocessing.get_context("fork")
    processes = []

    def start(count: int) -> Connection:
        mine, its = forking.Pipe()
        processes.append(forking.Process(target=hold, args=(count, tmp_path, its)))
        processes[-1].start()
        return mine

    try:
        assert start(2).recv() == ["0", "1"]
        assert start(2).recv() == ["2", "3"]
        waiting = start(2)
        assert not waiting.poll(1)
        processes[0].kill()  # a lock does not outlive its process, however that ends
        assert waiting.poll(10)
        assert waiting.recv() == ["0", "1"]
    finally:
        for process in processes:
            process.kill()
            process.join()


def config(devices: Any, jobs: int, accelerator: str = "auto") -> Any:
    trainer = {"devices": devices, "accelerator": accelerator}
    return OmegaConf.create({"trainer": trainer, "hydra": {"launcher": {"n_jobs": jobs}}})


@pytest.mark.parametrize(
    ("devices", "jobs", "message"),
    [
        (1, 4, "do not fit on 3 GPUs; choose hydra.launcher.n_jobs=3"),
        (2, 2, "do not fit on 3 GPUs; choose hydra.launcher.n_jobs=1"),
        (1, -1, "do not fit on 3 GPUs; choose hydra.launcher.n_jobs=3"),
        ("auto", 1, "needs a number of GPUs for a job, got trainer.devices=auto"),
    ],
)
def test_more_jobs_than_there_are_gpus_for_are_refused_before_any_runs(devices, jobs, message, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    with pytest.raises(SystemExit, match=message):
        launching.OwnGpus().on_multirun_start(config(devices, jobs))


def test_a_job_sees_the_gpus_that_it_has_locked_among_those_of_the_user(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    monkeypatch.setattr(launching, "_held", [])
    callback = launching.OwnGpus()
    callback.on_multirun_start(config(2, 1))
    callback.on_job_start(config(2, 1))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5"
    callback.on_job_start(config(2, 1))  # the worker's next job
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5"
    for locks in launching._held:
        locks.close()


def test_jobs_of_one_gpu_and_of_two_share_none(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "_held", [])
    assert [launching.claim(tmp_path, [*"0123"], count) for count in (2, 1, 1)] == [["0", "1"], ["2"], ["3"]]
    for locks in launching._held:
        locks.close()
