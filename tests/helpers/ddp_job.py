"""The processes of test_distributed.py: two ranks on gloo, each on its half of the data; rank 0 saves the results."""

import sys
from functools import partial
from pathlib import Path

import lightning as L
import torch
from head_cases import grad_of
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from transformers import get_constant_schedule

from lit_fused import CrossEntropyLoss, FusedCausalLMModule, LinearCrossEntropyLoss, PeakMemoryMonitor


class Recorder(L.Callback):
    """The gradients and norms of each optimiser step, and what was logged for it."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.losses: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: object) -> None:
        named = pl_module.model.backbone.named_parameters()  # type: ignore[union-attr]
        self.gradients.append({name: grad_of(p).clone() for name, p in named})

    def on_train_batch_end(self, trainer: L.Trainer, *_: object, **__: object) -> None:
        if not trainer.fit_loop._should_accumulate():
            self.losses.append(trainer.callback_metrics["train/loss"].item())


class Spike(L.Callback):
    """300 MiB in the optimiser's phase of rank 1."""

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: object) -> None:
        if trainer.global_rank == 1:
            torch.ones(300 * 2**20 // 4)


def main(folder: Path, loss: str, accumulated: int) -> None:
    module = FusedCausalLMModule(
        tiny_llama(),
        LinearCrossEntropyLoss() if loss == "chunked" else CrossEntropyLoss(),
        partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
        get_constant_schedule,
    )
    recorder, monitor = Recorder(), PeakMemoryMonitor(per_rank=True)
    trainer = quiet_trainer(
        folder,
        devices=2,
        strategy="ddp",
        precision="64-true",
        max_epochs=1,
        accumulate_grad_batches=accumulated,
        gradient_clip_val=0.5,
        use_distributed_sampler=False,
        callbacks=[recorder, Spike(), monitor],
    )
    batches = ragged_batches(8)
    rank = trainer.global_rank  # the third batch, without any valid token, is the whole of one rank's micro-batch
    trainer.fit(module, loader(batches[rank::2]), loader(batches[rank::2]))
    if trainer.is_global_zero:
        torch.save(
            {
                "gradients": recorder.gradients,
                "losses": recorder.losses,
                "weights": dict(module.model.backbone.named_parameters()),
                "val/loss": trainer.callback_metrics["val/loss"].item(),
                "val/accuracy": trainer.callback_metrics["val/accuracy"].item(),
                "peaks": monitor.peaks,
                "peaks by rank": monitor.peaks_by_rank,
                "memory": {k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("memory/")},
            },
            folder / "result.pt",
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
