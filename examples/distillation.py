"""Distill a student: a small model learns from a few rows what a larger one has learned from many.

python examples/distillation.py

Each token of this language is followed by four others, with odds that few rows do not show. You see the validation
loss of the teacher, of a student that has the tokens of these rows alone, of one that has the teacher beside it, and of
one that has the teacher's eight likeliest entries of each position, stored before. Then the best possible loss.
"""

from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from lit_fused import (
    DistillationLoss,
    FusedCausalLMModule,
    FusedDistillationModule,
    LanguageModel,
    LinearCrossEntropyLoss,
)
from lit_fused.objectives.distillation import STORED, scores_to_store

TOKENS, LENGTH = 200, 32
ODDS = torch.tensor([0.4, 0.3, 0.2, 0.1])


def rows(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Return rows of the language, in batches of 32."""
    followers = torch.randint(TOKENS, (TOKENS, 4), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(TOKENS, (count, LENGTH), generator=generator)
    for place in range(1, LENGTH):
        chosen = torch.multinomial(ODDS.expand(count, 4), 1, generator=generator)
        ids[:, place] = followers[ids[:, place - 1]].gather(1, chosen)[:, 0]
    return [{"input_ids": part, "labels": part} for part in ids.split(32)]


def model(size: int) -> PreTrainedModel:
    """Stand in for AutoModelForCausalLM.from_pretrained(NAME)."""
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=size,
        intermediate_size=2 * size,
        num_hidden_layers=1,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config)


def validation_loss(module: FusedCausalLMModule, batches: Any, steps: int) -> float:
    """Train a module, and return its loss on rows that it has not seen."""
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    held_out: Any = rows(256, 3)
    trainer.fit(module, DataLoader(batches, batch_size=None, shuffle=True))
    plain = FusedCausalLMModule(module.backbone)
    [found] = trainer.validate(plain, DataLoader(held_out, batch_size=None), verbose=False)
    return found["val/loss"]


def main() -> None:
    print("validation losses in nats", flush=True)
    L.seed_everything(0)
    many, few = rows(4096, 1), rows(96, 2)
    optimizer: dict[str, Any] = {"optimizer": partial(AdamW, lr=1e-2, weight_decay=0.0)}
    teacher = FusedCausalLMModule(model(128), **optimizer)
    print(f"teacher, 4096 rows        {validation_loss(teacher, many, 300):.3f}", flush=True)

    alone = FusedCausalLMModule(model(64), **optimizer)
    print(f"student, 96 rows          {validation_loss(alone, few, 300):.3f}", flush=True)

    beside = FusedDistillationModule(model(64), DistillationLoss("forward_kl"), teacher=teacher.backbone, **optimizer)
    print(f"the same, teacher beside  {validation_loss(beside, few, 300):.3f}", flush=True)

    # mode=score writes this into a Parquet file, and data.scores=FILE reads it.
    scorer = LanguageModel(teacher.backbone.eval(), LinearCrossEntropyLoss())
    with torch.no_grad():
        stored = [batch | dict(zip(STORED, scores_to_store(scorer, batch, 8), strict=True)) for batch in few]
    from_file = FusedDistillationModule(model(64), DistillationLoss("forward_kl"), **optimizer)
    print(f"the same, stored scores   {validation_loss(from_file, stored, 300):.3f}", flush=True)
    print(f"the best possible         {-(ODDS * ODDS.log()).sum():.3f}")


if __name__ == "__main__":
    main()
