"""After, the larger step: our module subclassed. The steps are ours; the optimizer and the logged norm stay its own.

python examples/after_subclass.py
diff examples/before.py examples/after_subclass.py

Besides the logits it spares, the module counts tokens: under gradient accumulation and data parallelism, and in
validation, the loss is the mean over all tokens, not a mean of means. It also logs perplexity, accuracy and entropy.
"""

import lightning as L
import torch
from project import build_model, fit
from torch import Tensor
from torch.optim import AdamW, Optimizer
from transformers import LlamaForCausalLM

from lit_fused import FusedCausalLMModule


class Pretrainer(FusedCausalLMModule):
    def __init__(self, model: LlamaForCausalLM, learning_rate: float = 1e-2) -> None:
        super().__init__(model)
        self.learning_rate = learning_rate

    def most_likely_next(self, input_ids: Tensor) -> Tensor:
        return self.generate(input_ids, max_new_tokens=1, do_sample=False)[:, -1]

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), lr=self.learning_rate)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("train/grad_norm", torch.stack(norms).norm())


def main() -> None:
    print("our module in the same project: ten steps on the CPU", flush=True)
    L.seed_everything(0)
    fit(Pretrainer(build_model()))


if __name__ == "__main__":
    main()
