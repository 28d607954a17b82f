"""Hidden states of a model that has been trained, for ``linear_cross_entropy.py --head``: real softmaxes, real errors.

    python benchmarks/train_head.py --text /usr/lib/python3 --minutes 2 --out head.pt
    python benchmarks/train_head.py --text /usr/lib/python3 --vocabulary 131072 --hidden-size 2048 --layers 4 \
        --minutes 3 --out wide_head.pt

A Llama (by default 115M: D=768, V=65536, 9 layers; tied) is trained on the .py, .md and .txt files of a folder with the
project itself. The file holds (hidden states, weight, targets) of 8192 held-out tokens in bfloat16, three times:
``trained``; ``initial``, of the same model before training, where the softmax is uniform; and ``peaked``, where one
trained row is multiplied by 20 and has all its probability on one token, not its target's.
"""

import argparse
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, get_constant_schedule_with_warmup

from lit_fused import FusedCausalLMModule
from lit_fused.data import TextEncoding, TokenDataModule, load_records

Head = tuple[Tensor, Tensor, Tensor]


@torch.no_grad()
def head_of(model: Any, blocks: list[dict[str, Tensor]], device: str) -> Head:
    """(N, D) hidden states, (V, D) weight, (N,) targets."""
    model.to(device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        hidden = torch.cat([model.model(b["input_ids"].to(device)).last_hidden_state[:, :-1] for b in blocks])
    targets = torch.cat([b["labels"][:, 1:] for b in blocks])
    hidden_ND = hidden.reshape(-1, hidden.shape[-1])[:8192].bfloat16().cpu().clone()
    return hidden_ND, model.lm_head.weight.detach().bfloat16().cpu().clone(), targets.reshape(-1)[:8192].clone()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model and keep hidden states of it.")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--max-bytes", type=int, default=120_000_000)
    parser.add_argument("--vocabulary", type=int, default=65_536)
    parser.add_argument("--hidden-size", type=int, default=768, help="a multiple of 64, the size of an attention head")
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    torch.manual_seed(0)
    source = load_records(options.text, max_bytes=options.max_bytes)
    data = TokenDataModule(source, TextEncoding(), block_size=1024, batch_size=32, vocab_size=options.vocabulary)
    data.prepare_data()
    data.setup("fit")
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=options.vocabulary,
            hidden_size=options.hidden_size,
            intermediate_size=options.hidden_size * 8 // 3 // 64 * 64,
            num_hidden_layers=options.layers,
            num_attention_heads=options.hidden_size // 64,
            num_key_value_heads=options.hidden_size // 64,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
    )
    held_out = iter(data.val_dataloader())
    blocks = [next(held_out)]
    heads = {"initial": head_of(model, blocks, options.device)}

    module = FusedCausalLMModule(
        model,
        optimizer=partial(torch.optim.AdamW, lr=6e-4),
        scheduler=partial(get_constant_schedule_with_warmup, num_warmup_steps=50),
    )
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        precision="bf16-mixed",
        max_time=timedelta(minutes=options.minutes),
        gradient_clip_val=1.0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    print(f"{trainer.global_step} steps, train loss {trainer.callback_metrics['train/loss']:.3f}")

    heads["trained"] = head_of(model, blocks, options.device)
    hidden, weight, targets = (t.clone() for t in heads["trained"])
    hidden[100] *= 20
    heads["peaked"] = hidden, weight, targets
    torch.save(heads, options.out)


if __name__ == "__main__":
    main()
