"""PeakMemoryMonitor on the CPU: real allocations of known size in known phases."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama

from lit_fused import CrossEntropyLoss, FusedCausalLMModule, LinearCrossEntropyLoss, PeakMemoryMonitor
from lit_fused.callbacks import peak_memory

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")

MIB = 2**20


def spike(mib: int) -> None:
    """Touch and free that much memory."""
    torch.ones(mib * MIB // 4)


class SpikyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mib: int) -> torch.Tensor:  # type: ignore[override]
        ctx.mib = mib
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        spike(ctx.mib)
        return grad, None


class Spikes(L.LightningModule):
    """Allocates, in each phase, as many MiB as the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch: dict[str, int], batch_idx: int) -> torch.Tensor:
        self.batch = batch
        spike(batch["forward"])
        return SpikyBackward.apply(self.weight, batch["backward"]).sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        spike(self.batch["optimizer"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Logged(L.Callback):
    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.callback_metrics and not trainer.fit_loop._should_accumulate():
            self.steps.append({name: value.item() for name, value in trainer.callback_metrics.items()})


def monitored(batches: list[Any], folder: Path, **options: Any) -> tuple[PeakMemoryMonitor, list[dict[str, float]]]:
    monitor, logged = PeakMemoryMonitor(summary=False), Logged()
    trainer = quiet_trainer(folder, max_epochs=1, callbacks=[monitor, logged], **options)
    trainer.fit(Spikes(), loader(batches))
    return monitor, logged.steps


def mib(gib: float) -> float:
    return gib * 1024


def test_each_phase_shows_its_own_allocations(tmp_path):
    quiet = {"forward": 1, "backward": 1, "optimizer": 1}
    loud = {"forward": 300, "backward": 600, "optimizer": 450}
    _, [base, step] = monitored([quiet, loud], tmp_path)
    for phase, size in loud.items():
        assert mib(step[f"memory/{phase}_gib"] - base[f"memory/{phase}_gib"]) == pytest.approx(size, abs=30)
    assert step["memory/peak_allocated_gib"] == step["memory/backward_gib"]
    assert "memory/peak_reserved_gib" not in step


def test_a_step_shows_the_maximum_over_its_micro_batches(tmp_path):
    quiet = {"forward": 1, "backward": 1, "optimizer": 1}
    _, steps = monitored(
        [quiet, quiet, quiet | {"forward": 400}, quiet | {"backward": 200}], tmp_path, accumulate_grad_batches=2
    )
    assert len(steps) == 2
    assert mib(steps[1]["memory/forward_gib"] - steps[0]["memory/forward_gib"]) == pytest.approx(400, abs=30)
    assert mib(steps[1]["memory/backward_gib"] - steps[0]["memory/backward_gib"]) == pytest.approx(200, abs=30)


@pytest.mark.slow
def test_its_figures_tell_the_standard_loss_from_the_chunked_one_on_a_vocabulary_of_50k(tmp_path, capsys):
    vocabulary, tokens = 50_000, 1024
    logits_mib = vocabulary * tokens * 4 / MIB
    batches = ragged_batches(4, batch=8, length=tokens // 8)

    def peak(loss: Any) -> float:
        model = tiny_llama(vocab_size=vocabulary, max_position_embeddings=128)
        monitor = PeakMemoryMonitor()
        module = FusedCausalLMModule(model, loss, partial(torch.optim.SGD, lr=0.1))
        quiet_trainer(tmp_path, max_steps=2, callbacks=[monitor]).fit(module, loader(batches))
        return mib(max(monitor.peaks.values()))

    first = peak(LinearCrossEntropyLoss())
    printed = capsys.readouterr().out
    standard = peak(CrossEntropyLoss())
    again = peak(LinearCrossEntropyLoss())
    assert standard - first > 2 * logits_mib  # the logits, and their gradient or float32 softmax beside them
    assert again - first < 0.5 * logits_mib  # what the run before has freed does not count
    assert "logits 8 x 128 x 50000 in float32, never built" in printed
    assert f"{logits_mib / 1024:.3f}" in printed
    assert re.search(rf"│ peak +│ +{first / 1024:.3f} │\n├─+┼─+┤\n│ logits", printed), printed


def test_where_the_kernel_offers_no_peak_it_says_so_and_trains_on(tmp_path, monkeypatch):
    def missing(self: Any) -> None:
        raise OSError("no such file")

    monkeypatch.setattr(peak_memory._PeakReader, "reset", missing)
    with pytest.warns(UserWarning, match="PeakMemoryMonitor logs nothing"):
        monitor, steps = monitored([{"forward": 1, "backward": 1, "optimizer": 1}], tmp_path)
    assert steps == []
    assert monitor.peaks == {}


@pytest.mark.gpu
def test_on_cuda_the_allocators_peaks_are_logged_per_phase(tmp_path):
    batches: list[Any] = [
        {"forward": 1, "backward": 1, "optimizer": 1},
        {"forward": 300, "backward": 600, "optimizer": 450},
    ]

    class OnDevice(Spikes):
        def training_step(self, batch: dict[str, int], batch_idx: int) -> torch.Tensor:
            self.batch = batch
            torch.ones(batch["forward"] * MIB // 4, device=self.device)
            return self.weight.sum()

    monitor, logged = PeakMemoryMonitor(summary=False), Logged()
    trainer = quiet_trainer(tmp_path, max_epochs=1, callbacks=[monitor, logged], accelerator="gpu")
    trainer.fit(OnDevice(), loader(batches))
    base, step = logged.steps
    assert mib(step["memory/forward_gib"] - base["memory/forward_gib"]) == pytest.approx(299, abs=3)
    assert step["memory/peak_reserved_gib"] >= step["memory/peak_allocated_gib"]
