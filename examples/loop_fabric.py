"""Train a Hugging Face model with Lightning Fabric, without logits: ``fuse`` is the one line.

python examples/loop_fabric.py

You see the training loss fall below that of guessing (ln 2000 = 7.6).
"""

from itertools import islice

import lightning as L
import torch
from project import build_loaders, build_model

import lit_fused


def main() -> None:
    print("Lightning Fabric: twelve steps in bf16-mixed", flush=True)
    fabric = L.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    fabric.seed_everything(0)
    model = lit_fused.fuse(build_model(2000))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for batch in islice(fabric.setup_dataloaders(build_loaders(2000)[0]), 12):
        loss = model(**batch).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(f"train/loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
