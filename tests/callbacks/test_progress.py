"""Test what a terminal shows of a run, at the widths that terminals have, and what a pipe gets."""

import io
import os
import pty
import re
import select
import subprocess
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from commands import SYNTHETIC, TIMEOUT_S, TINY_MODEL, command, environment
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from torch.utils.data import DataLoader

from lit_fused import FusedCausalLMModule
from lit_fused.callbacks import progress_bar
from lit_fused.callbacks.training_progress import ProgressLines, RunBar, total_steps


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_steps": 5}, 5),
        ({"max_epochs": 3}, 12),
        ({"max_epochs": 3, "max_steps": 5}, 5),
        ({"max_epochs": 1, "max_steps": 50}, 4),
        ({"max_epochs": 2, "accumulate_grad_batches": 3}, 4),  # the last step of an epoch has one batch
        ({"max_epochs": -1, "limit_train_batches": 2, "max_steps": 3}, 3),
    ],
)
def test_the_end_is_that_of_the_run_whichever_limit_comes_first(options, steps, tmp_path):
    totals = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
            totals.append(total_steps(trainer))

    trainer = quiet_trainer(tmp_path, callbacks=[Watch()], **options)
    trainer.fit(FusedCausalLMModule(tiny_llama()), loader(ragged_batches(4)))
    assert set(totals) == {steps}
    assert trainer.global_step == steps


def test_a_file_gets_lines_with_steps_losses_and_every_validation(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    options: Any = {"max_steps": 40, "val_check_interval": 10, "enable_progress_bar": True}
    trainer = quiet_trainer(tmp_path, callbacks=[progress_bar()], **options)
    trainer.fit(FusedCausalLMModule(tiny_llama()), loader(ragged_batches(40)), loader(ragged_batches(2)))
    lines = re.findall(r"^step (\d+)/40, loss [\d.]+(, val loss [\d.]+)?$", capsys.readouterr().out, re.MULTILINE)
    assert [step for step, val in lines if val] == ["10", "20", "30", "40"]
    assert lines[0] == ("1", "")


@pytest.mark.parametrize(
    ("terminal", "environment", "kind"),
    [
        (True, {"TERM": "xterm-256color"}, RunBar),
        (True, {"TERM": "xterm-256color", "NO_COLOR": "1"}, RunBar),
        (True, {"TERM": "dumb"}, ProgressLines),
        (False, {"TERM": "xterm-256color"}, ProgressLines),
        (False, {"TERM": "xterm-256color", "FORCE_COLOR": "1"}, ProgressLines),
    ],
)
def test_a_terminal_that_moves_its_cursor_has_a_bar_and_all_else_lines(terminal, environment, kind, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", SimpleTerminal(terminal))
    assert type(progress_bar()) is kind


class SimpleTerminal(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.slow
@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_a_real_terminal_shows_the_run(term: str, tmp_path: Path) -> None:
    job = [*SYNTHETIC, *TINY_MODEL, "trainer.max_steps=20", "callbacks=measure", "trainer.enable_checkpointing=false"]
    parent, child = pty.openpty()
    variables = environment(tmp_path) | {"TERM": term, "COLUMNS": "80", "LINES": "40", "NO_COLOR": "1"}
    process = subprocess.Popen(command(*job), cwd=tmp_path, env=variables, stdout=child, stderr=child, stdin=child)
    os.close(child)
    try:
        output = everything(parent, time.monotonic() + TIMEOUT_S)
        assert process.wait(timeout=30) == 0, output
    finally:
        process.kill()
        os.close(parent)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output)
    assert re.search(r"loss:? \d+\.\d+", plain)
    assert "Trainer.fit" not in plain
    assert not re.search(r"\x1b\[([0-9]+;)*[349][0-9][;m]", output), "NO_COLOR: no colours"
    assert ("━" in plain.partition("step ")[2].partition("loss")[0]) == (term != "dumb")


def everything(terminal: int, end: float) -> str:
    output = b""
    while time.monotonic() < end:
        if select.select([terminal], [], [], 1)[0]:
            try:
                part = os.read(terminal, 65536)
            except OSError:  # the other side has been closed
                break
            if not part:
                break
            output += part
    return output.decode(errors="replace")


class WithoutWaiting(L.Callback):
    """Lets steps 3 to 5 raise an error where they wait for a GPU, and notes what the bar and the callbacks read."""

    def __init__(self) -> None:
        self.losses: list[tuple[float | None, Any]] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if 3 <= batch_idx < 6 else "default")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        on_bar = trainer.progress_bar_metrics.get("train/loss")
        self.losses.append((on_bar, trainer.callback_metrics["train/loss"].clone()))


@pytest.mark.gpu
@pytest.mark.parametrize("bar", [False, True])
def test_a_step_of_any_trainer_waits_for_nothing_and_lightnings_bar_shows_the_last_steps_loss(bar, tmp_path):
    watching = WithoutWaiting()
    options: dict[str, Any] = {"enable_progress_bar": bar, "gradient_clip_val": 1.0, "precision": "bf16-mixed"}
    trainer = quiet_trainer(tmp_path, callbacks=[watching], accelerator="gpu", max_steps=8, **options)
    rows: Any = ragged_batches(8)
    try:
        trainer.fit(FusedCausalLMModule(tiny_llama()), DataLoader(rows, batch_size=None, pin_memory=True))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_bar, losses = zip(*watching.losses, strict=True)
    assert on_bar[0] is None
    if bar:  # Two batches have no label, and a loss that is not a number.
        assert on_bar[1:] == pytest.approx([loss.item() for loss in losses[:-1]], rel=0, abs=0, nan_ok=True)
    else:
        assert on_bar[1:] == (None,) * 7
