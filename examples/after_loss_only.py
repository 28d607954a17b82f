"""After, the smaller step: the project's own module, and only its loss is ours. Nothing builds the logits in training.

python examples/after_loss_only.py
diff examples/before.py examples/after_loss_only.py

A model that scales, caps or slices its logits (Gemma, Granite, Cohere, ...) needs more than its output layer: there
pass output_embeddings=lit_fused.heads.identify_head(model).
"""

import lightning as L
import torch
from project import build_model, fit
from torch import Tensor
from torch.optim import AdamW, Optimizer
from transformers import LlamaForCausalLM

from lit_fused import LinearCrossEntropyLoss


class Pretrainer(L.LightningModule):
    def __init__(self, model: LlamaForCausalLM, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.model = model
        self.loss = LinearCrossEntropyLoss(output_embeddings=model.get_output_embeddings())
        self.learning_rate = learning_rate

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.next_token_loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.next_token_loss(batch))

    def next_token_loss(self, batch: dict[str, Tensor]) -> Tensor:
        hidden_states = self.model.model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
        return self.loss(hidden_states, batch["labels"])

    def most_likely_next(self, input_ids: Tensor) -> Tensor:
        hidden_states = self.model.model(input_ids).last_hidden_state
        return self.loss.forward_logits(hidden_states[:, -1]).argmax(-1)

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), lr=self.learning_rate)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("train/grad_norm", torch.stack(norms).norm())


def main() -> None:
    print("an ordinary module with our loss: ten steps on the CPU", flush=True)
    L.seed_everything(0)
    fit(Pretrainer(build_model()))


if __name__ == "__main__":
    main()
