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
from commands import SYNTHETIC, TINY_MODEL, command, environment
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from rich.console import Console
from rich.progress import Progress
from torch.utils.data import DataLoader

from lit_fused import FusedCausalLMModule
from lit_fused.callbacks import PeakMemoryMonitor, TokenThroughput, progress_bar, throughput
from lit_fused.callbacks import training_progress as progress
from lit_fused.callbacks.training_progress import PlainProgress, RunProgressBar, figures, total_steps

LONG = ["loss 12.345", "lr 1.0e-4", "1,234,567 tokens/s", "MFU 41.2%", "peak 123.45 GiB"]
AFTER_VALIDATION = ["val loss 12.345", "val perplexity 123,400", "val accuracy 0.1234"]


def shown(bar: RunProgressBar, width: int, step: int, total: float) -> list[str]:
    """The lines of a bar on a terminal of that width."""
    output = io.StringIO()
    console = Console(file=output, width=width, force_terminal=True, color_system=None)
    with Progress(*bar.configure_columns(L.Trainer(logger=False)), console=console, auto_refresh=False) as live:
        bar.train_progress_bar_id = live.add_task("Epoch 12, step", total=total, completed=step)
        console.file = output = io.StringIO()
        live.refresh()
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.getvalue()).splitlines()]


@pytest.mark.parametrize(("width", "lines"), [(80, 2), (120, 2)])
def test_every_figure_is_whole_on_two_lines_and_three_after_validation(width, lines):
    bar = RunProgressBar()
    bar.left = progress.timedelta(hours=31, minutes=2)
    for texts, expected in ((LONG, lines), (LONG + AFTER_VALIDATION, lines + 1)):
        bar.texts = texts
        found = [line for line in shown(bar, width, 123_456, 1_000_000) if line]
        found = list(dict.fromkeys(found))  # the last frame is drawn again at the end
        assert len(found) == expected, found
        assert all(len(line) <= width for line in found)
        assert found[0].startswith("Epoch 12, step 123,456/1,000,000 ")
        assert found[0].endswith("12%  1 day, 7:02:00 left")
        assert [text for line in found[1:] for text in re.split("  +", line)] == texts


def test_a_run_without_an_end_has_neither_share_nor_time_left():
    bar = RunProgressBar()
    bar.texts = ["loss 1.000"]
    line = next(line for line in shown(bar, 80, 7, float("inf")) if line)
    assert line.startswith("Epoch 12, step 7 ")
    assert "%" not in line
    assert "left" not in line


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
    bar = RunProgressBar()
    totals = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
            totals.append(total_steps(trainer))

    trainer = quiet_trainer(tmp_path, enable_progress_bar=True, callbacks=[bar, Watch()], **options)
    trainer.fit(FusedCausalLMModule(tiny_llama()), loader(ragged_batches(4)))
    assert set(totals) == {steps}
    assert trainer.global_step == steps
    assert bar.progress is not None
    assert (bar.train_progress_bar.total, bar.train_progress_bar.completed) == (steps, steps)


def test_an_endless_data_set_without_a_limit_has_no_end():
    trainer = L.Trainer(max_epochs=-1, logger=False, accelerator="cpu")
    assert total_steps(trainer) == float("inf")


def test_the_figures_are_those_that_were_logged_and_validation_has_none_before_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "peak_flops", lambda device, precision: 1e9)
    seen: list[list[str]] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
            seen.append(figures(trainer, {}))

    module = FusedCausalLMModule(tiny_llama(), optimizer=lambda groups: torch.optim.SGD(groups, lr=0.25))
    module.make_scheduler = lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    trainer = quiet_trainer(
        tmp_path,
        max_steps=8,
        val_check_interval=4,
        callbacks=[TokenThroughput(2), PeakMemoryMonitor(summary=False), Watch()],
    )
    trainer.fit(module, loader(ragged_batches(8)), loader(ragged_batches(1)))
    names = [re.sub(r"[\d.,]+(e[+-]?\d+)?%?|nan", "#", text) for text in seen[-1]]  # The last batch has no label.
    assert names == ["loss #", "lr #", "# tokens/s", "MFU #", "peak # GiB", "val loss #", "val perplexity #"]
    assert seen[-1][1] == "lr 2.5e-1"
    assert not any(text.startswith("val") for texts in seen[:4] for text in texts)


def test_figures_are_read_a_few_times_per_second_only(tmp_path, monkeypatch):
    reads = []
    monkeypatch.setattr(progress, "figures", lambda trainer, late: reads.append(trainer.global_step) or [])
    now = [0.0]
    monkeypatch.setattr(progress, "perf_counter", lambda: now[0])

    class Clock(L.Callback):
        def on_train_batch_start(self, *_: Any, **__: Any) -> None:
            now[0] += 0.1

    trainer = quiet_trainer(tmp_path, max_steps=12, enable_progress_bar=True, callbacks=[Clock(), RunProgressBar()])
    trainer.fit(FusedCausalLMModule(tiny_llama()), loader(ragged_batches(12)))
    assert reads == [1, 4, 7, 10, 12]


def test_a_pipe_gets_a_line_every_few_seconds_and_at_the_end(tmp_path, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress, "perf_counter", lambda: now[0])

    class Clock(L.Callback):
        def on_train_batch_start(self, *_: Any, **__: Any) -> None:
            now[0] += 4.0

        def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
            now[0] += 1000.0  # the time left is judged by steps alone

    trainer = quiet_trainer(
        tmp_path, max_steps=8, val_check_interval=2, enable_progress_bar=True, callbacks=[Clock(), PlainProgress()]
    )
    trainer.fit(FusedCausalLMModule(tiny_llama()), loader(ragged_batches(8)), loader(ragged_batches(2)))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert [line.partition(",")[0] for line in lines] == [f"step {n}/8" for n in (1, 3, 5, 7, 8)]
    assert "0:00:20 left, loss " in lines[1]
    assert "\r" not in "".join(lines)
    trainer.validate(FusedCausalLMModule(tiny_llama()), loader(ragged_batches(3)), verbose=False)
    output = capsys.readouterr().out
    assert re.search("^Validation: 3/3$", output, re.MULTILINE)
    sets = {"web": loader(ragged_batches(1)), "code": loader(ragged_batches(2))}
    trainer.validate(FusedCausalLMModule(tiny_llama()), sets, verbose=False)
    output = capsys.readouterr().out
    assert all(line in output for line in ("Validation web: 1/1\n", "Validation code: 2/2\n"))
    assert "\x1b" not in output


@pytest.mark.parametrize(
    ("terminal", "environment", "kind"),
    [
        (True, {"TERM": "xterm-256color"}, RunProgressBar),
        (True, {"TERM": "xterm-256color", "NO_COLOR": "1"}, RunProgressBar),
        (True, {"TERM": "dumb"}, PlainProgress),
        (False, {"TERM": "xterm-256color"}, PlainProgress),
        (False, {"TERM": "xterm-256color", "FORCE_COLOR": "1"}, PlainProgress),
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
        output = everything(parent, time.monotonic() + 120)
        assert process.wait(timeout=30) == 0, output
    finally:
        process.kill()
        os.close(parent)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output)
    assert "20/20" in plain
    assert " tokens/s" in plain
    assert not re.search(r"\x1b\[([0-9]+;)*[349][0-9][;m]", output), "NO_COLOR: no colours"
    assert ("\x1b[" in output) == (term != "dumb"), "a dumb terminal gets no sequences at all"
    assert ("Epoch 2, step 20/20 ━" in plain) == (term != "dumb")


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
    assert on_bar == (None, *([loss.item() for loss in losses[:-1]] if bar else [None] * 7))
