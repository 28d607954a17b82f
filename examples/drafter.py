"""Train a drafter for speculative decoding (EAGLE, arXiv:2401.15077) against its target's whole distribution.

python examples/drafter.py

``drafter_for`` makes a model of one layer from its target: it sees the embedding of token t and the target's hidden
state of token t - 1, and predicts token t + 1 with the target's own output layer. ``FusedDistillationModule`` teaches
it the target's probabilities of the whole vocabulary, without logits of either, and the target's hidden states, as it
goes on from its own. You see how many of five drafted tokens in a row are those that the target writes.
"""

from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

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


def run(model: Any, ids: Tensor, **states: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states (B, T, D), and the likeliest token behind the last one, (B, 1)."""
    output = model(input_ids=ids, use_cache=False, output_hidden_states=True, **states)
    return output.hidden_states[-1], output.logits[:, -1:].argmax(-1)


@torch.no_grad()
def draft(drafter: Any, target: Any, ids: Tensor, count: int) -> Tensor:
    """Return the tokens (B, count) that follow ``ids`` (B, T) and the target's own next one."""
    states, token = run(target, ids)
    states, ids = torch.cat([torch.zeros_like(states[:, :1]), states], 1), torch.cat([ids, token], 1)
    for _ in range(count):
        drafted, token = run(drafter, ids, previous_hidden_states=states)
        states, ids = torch.cat([states, drafted[:, -1:]], 1), torch.cat([ids, token], 1)
    return ids[:, -count:]


def accepted(drafter: Any, target: Any, ids: Tensor) -> float:
    """Return how many of five drafted tokens are those of the target, up to the first that is not."""
    options: Any = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "do_sample": False}
    written = target.generate(ids, max_new_tokens=1 + DRAFTED, **options)[:, ids.shape[1] + 1 :]
    right = draft(drafter, target, ids, DRAFTED) == written
    return right.long().cumprod(1).sum(1).double().mean().item()


def fit(module: L.LightningModule) -> None:
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=5, enable_model_summary=False, **quiet)
    trainer.fit(module, DataLoader(rows(4096, 1), batch_size=None, shuffle=True))


def main() -> None:
    print("a target, and a drafter for it", flush=True)
    L.seed_everything(0)
    optimizer: Any = lambda parameters: AdamW(parameters, lr=3e-3)  # noqa: E731
    target: Any = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG, num_hidden_layers=3))
    fit(lit_fused.FusedCausalLMModule(target, optimizer=optimizer))
    with TemporaryDirectory() as folder:
        target.save_pretrained(folder)
        drafter = lit_fused.drafter_for(folder)
    ids = torch.cat([batch["input_ids"] for batch in rows(256, 3)])[:, :12]
    print(f"of {DRAFTED} drafted tokens the target accepts {accepted(drafter, target.eval(), ids):.2f} before training")
    loss = lit_fused.DistillationLoss(hidden_weight=1.0)
    fit(lit_fused.FusedDistillationModule(drafter.train(), loss, teacher=target, optimizer=optimizer))
    print(f"of {DRAFTED} drafted tokens the target accepts {accepted(drafter.eval(), target, ids):.2f} after")


if __name__ == "__main__":
    main()
