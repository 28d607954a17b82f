"""Train a drafter for speculative decoding (EAGLE, arXiv:2401.15077) against its target's whole distribution.

python examples/drafter.py

One layer sees the target's hidden state of token t and the embedding of token t + 1, and makes the hidden state of
token t + 1, from which the target's own output layer predicts token t + 2. ``linear_distillation`` gives the divergence
of the two predictions over the whole vocabulary, without logits of either. You see how many of five drafted tokens in a
row are those that the target writes.
"""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaModel, PreTrainedModel

import lit_fused

TOKENS, LENGTH, DRAFTED = 100, 24, 5
CONFIG: dict[str, Any] = {"vocab_size": TOKENS, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


def rows(count: int, seed: int) -> Any:
    """Return rows in which a token nearly always follows from the two before it, in batches of 32."""
    follower = torch.randint(TOKENS, (16, TOKENS), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(TOKENS, (count, LENGTH), generator=generator)
    for place in range(2, LENGTH):
        follows = torch.rand(count, generator=generator) < 0.95
        next_one = follower[ids[:, place - 2] % 16, ids[:, place - 1]]
        ids[:, place] = next_one.where(follows, ids[:, place])
    return [{"input_ids": part, "labels": part} for part in ids.split(32)]


class Drafter(L.LightningModule):
    """A layer that goes on where a frozen target has stopped."""

    def __init__(self, target: PreTrainedModel) -> None:
        super().__init__()
        self.target: Any = target.eval().requires_grad_(False)
        size = target.config.hidden_size
        self.both = nn.Linear(2 * size, size, bias=False)
        self.layer = LlamaModel(LlamaConfig(**CONFIG, num_hidden_layers=1))
        del self.layer.embed_tokens  # It gets the target's embeddings.

    def forward(self, states: Tensor, next_ids: Tensor) -> Tensor:
        """Return the hidden states (B, T, D) of tokens (B, T) that follow those of ``states`` (B, T, D)."""
        embeddings = self.target.get_input_embeddings()(next_ids)
        inputs = self.both(torch.cat([states, embeddings], -1))
        return self.layer(inputs_embeds=inputs, use_cache=False).last_hidden_state

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids, weight = batch["input_ids"], self.target.lm_head.weight
        with torch.no_grad():
            states = self.target.model(ids).last_hidden_state
        drafted, wanted = self(states[:, :-2], ids[:, 1:-1]), states[:, 1:-1]
        teacher = lit_fused.TeacherHead(wanted, weight)
        loss, _ = lit_fused.linear_distillation(drafted, weight, ids[:, 2:], teacher, cross_entropy_weight=0.0)
        return loss + F.smooth_l1_loss(drafted, wanted)

    @torch.no_grad()
    def draft(self, ids: Tensor, count: int) -> Tensor:
        """Return the tokens (B, count) that follow ``ids`` (B, T) and the target's own next one."""
        states = self.target.model(ids).last_hidden_state
        tokens = torch.cat([ids[:, 1:], self.target.lm_head(states[:, -1:]).argmax(-1)], 1)
        for _ in range(count):
            last = self(states, tokens)[:, -1:]
            states, tokens = (
                torch.cat([states, last], 1),
                torch.cat([tokens, self.target.lm_head(last).argmax(-1)], 1),
            )
        return tokens[:, -count:]

    def accepted(self, ids: Tensor) -> float:
        """Return how many of five drafted tokens are those of the target, up to the first that is not."""
        options: Any = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "do_sample": False}
        written = self.target.generate(ids, max_new_tokens=1 + DRAFTED, **options)[:, ids.shape[1] + 1 :]
        right = self.draft(ids, DRAFTED) == written
        return right.long().cumprod(1).sum(1).double().mean().item()

    def configure_optimizers(self) -> AdamW:
        return AdamW([p for p in self.parameters() if p.requires_grad], lr=3e-3)


def fit(module: L.LightningModule, epochs: int) -> None:
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=epochs, enable_model_summary=False, **quiet)
    trainer.fit(module, DataLoader(rows(4096, 1), batch_size=None, shuffle=True))


def main() -> None:
    print("a target, and a drafter for it", flush=True)
    L.seed_everything(0)
    target = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG, num_hidden_layers=3))
    fit(lit_fused.FusedCausalLMModule(target, optimizer=lambda p: AdamW(p, lr=3e-3)), epochs=5)
    module = Drafter(target)
    start = rows(256, 3)
    ids = torch.cat([batch["input_ids"] for batch in start])[:, :12]
    print(f"of {DRAFTED} drafted tokens the target accepts {module.accepted(ids):.2f} before training")
    fit(module, epochs=5)
    print(f"of {DRAFTED} drafted tokens the target accepts {module.eval().accepted(ids):.2f} after")


if __name__ == "__main__":
    main()
