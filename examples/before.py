"""Before: an ordinary LightningModule around a Hugging Face model. It builds the logits of every token in the batch.

python examples/before.py
diff examples/before.py examples/after_loss_only.py
diff examples/before.py examples/after_subclass.py
"""

import lightning as L
import torch
import torch.nn.functional as F
from project import build_model, fit
from torch import Tensor
from torch.optim import AdamW, Optimizer
from transformers import LlamaForCausalLM


class Pretrainer(L.LightningModule):
    def __init__(self, model: LlamaForCausalLM, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.model = model
        self.learning_rate = learning_rate

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.next_token_loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.next_token_loss(batch))

    def next_token_loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["input_ids"], batch["attention_mask"]).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    def most_likely_next(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids).logits[:, -1].argmax(-1)

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), lr=self.learning_rate)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("train/grad_norm", torch.stack(norms).norm())


def main() -> None:
    print("an ordinary module with its own loss: ten steps on the CPU", flush=True)
    L.seed_everything(0)
    fit(Pretrainer(build_model()))


if __name__ == "__main__":
    main()
