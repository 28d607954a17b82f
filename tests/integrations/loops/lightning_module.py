"""Train a transformers model by a LightningModule that takes the cross entropy of its logits."""

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig


class Module(L.LightningModule):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_config(config)
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        logits = self.model(batch["input_ids"]).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(dtype: torch.dtype = torch.float32) -> list[float]:
    L.seed_everything(0, verbose=False)
    config = LlamaConfig(
        vocab_size=503, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    module = Module(config).to(dtype)
    rows = torch.randint(503, (24, 24))
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=4))  # type: ignore[arg-type]
    return module.losses
