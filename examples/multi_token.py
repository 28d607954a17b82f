"""Learn several tokens ahead: three heads beside the next token's, which draft what the model would generate.

python examples/multi_token.py

Each head makes other hidden states for the same output layer, h + silu(W h) with W zero at first (arXiv:2401.10774),
and its loss needs no logits either: ``linear_cross_entropy``. You see the validation loss of each of the next four
tokens before and after training, and how many of the tokens that are drafted in one pass are those that the model
generates one by one.
"""

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from lit_fused import linear_cross_entropy

TOKENS, LENGTH, HEADS, WEIGHT = 100, 24, 3, 1.0  # WEIGHT: of the heads' mean loss, beside the next token's


def rows(count: int, seed: int) -> Any:
    """Return rows in which a token nearly always has the same follower, in batches of 32."""
    follower = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(TOKENS, (count, LENGTH), generator=generator)
    for place in range(1, LENGTH):
        follows = torch.rand(count, generator=generator) < 0.95
        ids[:, place] = follower[ids[:, place - 1]].where(follows, ids[:, place])
    return [{"input_ids": part, "labels": part} for part in ids.split(32)]


def build_model() -> PreTrainedModel:
    """Stand in for AutoModelForCausalLM.from_pretrained(NAME)."""
    config = LlamaConfig(
        vocab_size=TOKENS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    return AutoModelForCausalLM.from_config(config)


class MultiToken(L.LightningModule):
    """Position t of rows without padding predicts token t + 1, and by further heads t + 2, t + 3 ..."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone, size = backbone, backbone.config.hidden_size
        self.heads = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(HEADS))
        for p in self.heads.parameters():
            nn.init.zeros_(p)

    def states(self, input_ids: Tensor) -> Iterator[Tensor]:
        """Yield hidden states (B, T, D), from which the output layer predicts tokens t + 1, t + 2 ..."""
        states = self.backbone.model(input_ids).last_hidden_state
        yield states
        for head in self.heads:
            yield states + F.silu(head(states))

    def losses(self, batch: dict[str, Tensor]) -> list[Tensor]:
        """Return the mean loss () of each token ahead."""
        labels, weight = batch["labels"], self.backbone.lm_head.weight
        places = enumerate(self.states(batch["input_ids"]), 1)
        return [linear_cross_entropy(own[:, :-ahead], weight, labels[:, ahead:])[0] for ahead, own in places]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        first, *further = self.losses(batch)
        return first + WEIGHT * torch.stack(further).mean()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        for ahead, loss in enumerate(self.losses(batch), 1):
            self.log(f"val/loss_of_token_{ahead}", loss, batch_size=len(batch["labels"]))

    @torch.no_grad()
    def drafted(self, input_ids: Tensor) -> Tensor:
        """Return the next tokens (B, 1 + HEADS) that one forward pass gives."""
        logits = [self.backbone.lm_head(own[:, -1]) for own in self.states(input_ids)]
        return torch.stack(logits, 1).argmax(-1)

    def configure_optimizers(self) -> AdamW:
        return AdamW(self.parameters(), lr=3e-3, weight_decay=0.0)


def main() -> None:
    print("heads for the next tokens, trained in four epochs", flush=True)
    L.seed_everything(0)
    module = MultiToken(build_model())
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=4, enable_model_summary=False, **quiet)
    held_out = DataLoader(rows(64, 2), batch_size=None)
    [before] = trainer.validate(module, held_out, verbose=False)
    trainer.fit(module, DataLoader(rows(2048, 1), batch_size=None, shuffle=True))
    [after] = trainer.validate(module, held_out, verbose=False)
    for ahead, name in enumerate(before, 1):
        print(f"token {ahead}: loss {before[name]:.2f} before training, {after[name]:.2f} after")

    start = rows(32, 3)[0]["input_ids"][:, :8]
    options: Any = {"attention_mask": torch.ones_like(start), "pad_token_id": 0, "do_sample": False}
    generated = module.eval().backbone.generate(start, max_new_tokens=1 + HEADS, **options)
    agree = (module.drafted(start) == generated[:, 8:]).double().mean().item()
    print(f"drafted as generated: {100 * agree:.0f}%")


if __name__ == "__main__":
    main()
