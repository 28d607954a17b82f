"""Context parallelism: two devices divide the tokens of each row, and train as one does.

torchrun --nproc-per-node 2 examples/long_context.py
python examples/long_context.py

Both print the same losses. With two processes each has half of the tokens of a row in all layers, so that a row of
twice the length needs no more memory of a device. With GPUs, write accelerator="gpu".
"""

import os
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lit_fused import ContextStrategy, FusedCausalLMModule

LENGTH, VOCAB_SIZE = 4_001, 8_000  # devices need not divide the length
DEVICES = int(os.environ.get("WORLD_SIZE", "1"))  # of torchrun


class Losses(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if trainer.is_global_zero:
            loss, norm = (trainer.callback_metrics[name] for name in ("train/loss", "train/gradient_norm"))
            print(f"step {trainer.global_step} train/loss {loss:.4f} train/gradient_norm {norm:.4f}", flush=True)


def rows() -> list[dict[str, Tensor]]:
    """Return rows whose second half repeats the first, which another device has."""
    half = torch.randint(VOCAB_SIZE, (5, LENGTH // 2 + 1), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": ids, "labels": ids} for ids in torch.cat([half, half], 1)[:, :LENGTH]]


def main() -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"five steps of rows of {LENGTH:,} tokens", flush=True)
    L.seed_everything(0, verbose=False)
    sizes: Any = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=LENGTH, **sizes))
    module = FusedCausalLMModule(model, optimizer=partial(AdamW, lr=1e-3))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=DEVICES,
        strategy=ContextStrategy(context_parallel_size=DEVICES),
        max_epochs=1,
        callbacks=[Losses()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    dataset: Any = rows()
    trainer.fit(module, DataLoader(dataset))
    if trainer.is_global_zero:
        print(f"each of {DEVICES} devices has at most {-(-LENGTH // DEVICES):,} tokens of a row")


if __name__ == "__main__":
    main()
