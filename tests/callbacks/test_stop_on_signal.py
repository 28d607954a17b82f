"""Signals: a run that is asked to stop saves first, says how to go on, and ends with the signal's exit code."""

import csv
import os
import pty
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import lightning as L
import pytest
import torch
from checkpoint_fits import train
from commands import ROOT, SYNTHETIC, TIMEOUT_S, TINY_MODEL, command, environment
from ranks import each

from lit_fused.callbacks import RunCheckpoint, StopOnSignal
from lit_fused.errors import Stopped
from lit_fused.parallel.checkpoint import read_weights
from lit_fused.parallel.collectives import objects_of_ranks

SMALL = [
    *(*SYNTHETIC, *TINY_MODEL, "data.num_train_batches=5000", "hydra.run.dir=out", "trainer.max_steps=5000"),
    "callbacks.checkpoint.every_n_train_steps=1000",
]
LAST = Path("out", "checkpoints", "last.ckpt")


def stopped(folder: Path, overrides: list[str], when: Callable[[str], bool], *signals: int) -> tuple[int | None, str]:
    """Run train.py, send it signals as soon as ``when`` is true of its output; return its exit status and output."""
    output = folder / "log.txt"
    script = forked.start(ROOT / "train.py", overrides, cwd=folder, env=environment(folder), output=output)
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while not when(output.read_text() if output.exists() else ""):
            assert script.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(forked.POLL_S)
        for number in signals:
            os.kill(script.pid, number)
            time.sleep(1.3)
        [status] = forked.run_together([script], 60)
    finally:
        script.stop()
    return status, output.read_text()


def step_of(path: Path) -> int:
    return torch.load(path, weights_only=True)["global_step"]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_run_after_a_step_that_is_saved(number, code, tmp_path):
    status, output = stopped(tmp_path, SMALL, lambda text: "step 1/5000" in text, number)
    assert status == code, output
    assert "Traceback" not in output
    step = step_of(tmp_path / LAST)
    assert 0 < step < 1000
    name = signal.Signals(number).name
    path = tmp_path / LAST
    assert (tmp_path / "out" / "error.txt").read_text() == (
        f"stopped by {name} at step {step}; resume with ckpt_path={path}\n"
    )
    assert f"{name}: the run stops after this step" in output
    assert re.search(rf"Stopped at step {step}\. Resume with:\n  .*ckpt_path={path}\n", output)
    assert output.count("ckpt_path=") == 1
    assert not (tmp_path / "out" / "exported").exists()
    with (tmp_path / "out" / "metrics.csv").open() as file:
        logged = [int(row["step"]) + 1 for row in csv.DictReader(file) if row["train/loss"]]
    assert max(logged) == step


@pytest.mark.slow
def test_a_run_whose_terminal_closes_saves_its_step(tmp_path):
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.execvpe(command()[0], command(*SMALL), environment(tmp_path))
    output, deadline = "", time.monotonic() + TIMEOUT_S
    while not re.search("step [1-9]", output) and time.monotonic() < deadline:
        output += os.read(terminal, 65536).decode(errors="replace")
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    assert 0 < step_of(tmp_path / LAST) < 1000
    assert (tmp_path / "out" / "error.txt").read_text().startswith("stopped by SIGHUP at step")


SOON = [*SMALL, "trainer.max_steps=3"]
MOMENTS: dict[str, tuple[list[str], Callable[[str], bool], int]] = {
    # overrides, when the signal comes, the step that is saved
    "setting up": (SMALL, lambda text: "Seed set" in text, 0),
    "sampling first": ([*SMALL, "callbacks.sample_text.max_new_tokens=500"], lambda text: "Total params" in text, 1),
    "the validation at the end": ([*SOON, "data.num_val_batches=100000"], lambda _: LAST.exists(), 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_at_any_other_moment_ends_the_run_as_well(moment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides, when, step = MOMENTS[moment]
    status, output = stopped(tmp_path, overrides, when, signal.SIGTERM)
    assert status == 143, output
    assert "Traceback" not in output
    if not step or (moment == "sampling first" and not LAST.exists()):
        assert not (tmp_path / "out").exists()  # a run that has trained nothing leaves nothing
        return
    assert (tmp_path / "out" / "error.txt").read_text().startswith("stopped by SIGTERM")
    assert step_of(LAST) == step


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once(tmp_path):
    slow_step = [*SMALL, "data.block_size=1024", "data.batch_size=32", "model.config.num_hidden_layers=60"]
    status, output = stopped(tmp_path, slow_step, lambda text: "Total params" in text, signal.SIGINT, signal.SIGINT)
    assert status == 130, output
    assert "Traceback" not in output
    assert not (tmp_path / LAST).exists()


@pytest.mark.slow
def test_a_signal_ends_a_sweep_and_not_its_run_alone(tmp_path):
    overrides = ["-m", *SMALL, "seed=1,2", "hydra.sweep.dir=sweep"]
    status, output = stopped(tmp_path, overrides, lambda text: "step 1/5000" in text, signal.SIGTERM)
    assert status == 143, output
    assert (tmp_path / "sweep" / "0" / "error.txt").read_text().startswith("stopped by SIGTERM at step")
    assert not (tmp_path / "sweep" / "1").exists()


class AsksItself(L.Callback):
    """Sends SIGTERM to rank 1, among the micro-batches of the fourth step."""

    def on_before_backward(self, trainer: L.Trainer, *_: object, **__: object) -> None:
        if trainer.global_step == 3 and trainer.global_rank == 1 and not trainer.fit_loop._should_accumulate():
            os.kill(os.getpid(), signal.SIGTERM)


def asked(strategy: str, folder: Path) -> Any:
    """Return how each rank ends if rank 1 is asked to stop."""
    saver = RunCheckpoint(folder / strategy, every_n_train_steps=100)
    callbacks = [StopOnSignal(), AsksItself(), saver]
    try:
        train(strategy, folder, 100, enable_checkpointing=True, callbacks=callbacks)
    except Stopped as stopped:
        return objects_of_ranks((stopped.code, stopped.sentence))


@pytest.mark.parametrize("strategies", [["fsdp2"], pytest.param(["ddp", "tp"], marks=pytest.mark.slow)], ids="+".join)
def test_all_ranks_save_and_stop_at_the_same_step_if_one_is_asked(strategies, tmp_path):
    whole, module = train("auto", tmp_path, epochs=2)
    for strategy, found in each(asked, 2, strategies, tmp_path).items():
        last = tmp_path / strategy / "last.ckpt"
        end = (143, f"stopped by SIGTERM at step {whole.global_step}; resume with ckpt_path={last}")
        assert found == [end, end]
        weights = read_weights(last)
        for name, p in module.state_dict().items():
            assert torch.allclose(weights[name], p, rtol=1e-3, atol=1e-5), name
