"""Learn several tokens ahead: three heads beside the next token's, which draft what the model would generate.

python examples/multi_token.py

You see the validation loss of each of the next four tokens before and after training, and how many of the tokens that
are drafted in one pass are those that the model generates one by one.
"""

from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from lit_fused import FusedMultiTokenModule

TOKENS, LENGTH, HEADS = 100, 24, 3


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


@torch.no_grad()
def drafted(module: FusedMultiTokenModule, batch: dict[str, Tensor]) -> Tensor:
    """Return the next tokens (B, 1 + HEADS) that one forward pass gives."""
    backbone: Any = module.backbone
    model: Any = module.model
    states = backbone.model(batch["input_ids"]).last_hidden_state
    logits = [backbone.lm_head(own[:, -1]) for own in (states, *model.ahead(states, batch))]
    return torch.stack(logits, 1).argmax(-1)


def main() -> None:
    L.seed_everything(0)
    optimizer = partial(AdamW, lr=3e-3, weight_decay=0.0)
    module = FusedMultiTokenModule(build_model(), optimizer=optimizer, heads=HEADS, weight=1.0)
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=4, enable_model_summary=False, **quiet)
    held_out = DataLoader(rows(64, 2), batch_size=None)
    [before] = trainer.validate(module, held_out, verbose=False)
    trainer.fit(module, DataLoader(rows(2048, 1), batch_size=None, shuffle=True))
    [after] = trainer.validate(module, held_out, verbose=False)
    for place in range(1, HEADS + 2):
        name = "val/loss" if place == 1 else f"val/loss_of_token_{place}"
        print(f"token {place}: loss {before[name]:.2f} before training, {after[name]:.2f} after")

    batch = {"input_ids": rows(32, 3)[0]["input_ids"][:, :8]}
    backbone: Any = module.eval().backbone
    every = torch.ones_like(batch["input_ids"])
    generated = backbone.generate(
        **batch, attention_mask=every, pad_token_id=0, max_new_tokens=1 + HEADS, do_sample=False
    )
    agree = (drafted(module, batch) == generated[:, 8:]).double().mean().item()
    print(f"drafted as generated: {100 * agree:.0f}%")


if __name__ == "__main__":
    main()
