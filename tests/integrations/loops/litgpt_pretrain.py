"""Pretrain a GPT that another package defines, with Fabric, in the style of LitGPT."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GPT(nn.Module):
    """Stands in for ``litgpt.GPT``: it returns logits, and its output layer is ``lm_head``."""

    def __init__(self, padded_vocab_size: int = 503, n_embd: int = 32) -> None:
        super().__init__()
        self.lm_head = nn.Linear(n_embd, padded_vocab_size, bias=False)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(padded_vocab_size, n_embd),
                "h": nn.GRU(n_embd, n_embd, batch_first=True),
                "ln_f": nn.LayerNorm(n_embd),
            }
        )

    def forward(self, idx: Tensor) -> Tensor:
        x, _ = self.transformer["h"](self.transformer["wte"](idx))
        return self.lm_head(self.transformer["ln_f"](x))


def chunked_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-100)


def main(dtype: torch.dtype = torch.float32) -> list[float]:
    fabric = L.Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(0)
    model = GPT().to(dtype)
    model = fabric.setup(model)
    optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for train_data in torch.randint(503, (6, 4, 25)):
        input_ids = train_data[:, :-1].contiguous()
        targets = train_data[:, 1:].contiguous()
        logits = model(input_ids)
        loss = chunked_cross_entropy(logits, targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
