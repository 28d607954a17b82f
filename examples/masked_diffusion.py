"""Train a masked diffusion model: a tiny EuroBERT learns to write lines by filling in masks, in any order.

python examples/masked_diffusion.py

A row has any number of masks in training. A line is written from masks alone: again and again, the mask whose token the
model is most certain of gets one. You see lines, and the share of a hundred whose animal says its own sound.
"""

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import AdamW
from transformers import EuroBertConfig, EuroBertForMaskedLM

from lit_fused import FusedMaskedLMModule
from lit_fused.data import TextEncoding, TokenDataModule
from lit_fused.training import cosine_with_warmup

SOUNDS = {"cow": "moo", "dog": "woof", "cat": "meow", "duck": "quack", "sheep": "baa", "pig": "oink", "owl": "hoot"}


def write_lines(file: Path) -> None:
    """Write 700 records: what an animal says, and when."""
    texts = [f"at {n} the {animal} said {sound}" for n in range(100) for animal, sound in SOUNDS.items()]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def build_model() -> EuroBertForMaskedLM:
    config = EuroBertConfig(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=0,  # of the tokenizer that is trained on the lines
        eos_token_id=0,
        pad_token_id=1,
        mask_token_id=2,
    )
    return EuroBertForMaskedLM(config)


@torch.no_grad()
def write(model: Any, ids: Tensor, mask: int) -> Tensor:
    """Return rows (B, T) whose masks are filled in, one of each row at a time, with tokens drawn from the model."""
    ids = ids.clone()
    for _ in range(int((ids == mask).sum(1).max())):
        probabilities = model(input_ids=ids).logits.softmax(-1)
        probabilities[..., mask] = 0
        certain = probabilities.amax(-1).where(ids == mask, -1)
        place = certain.argmax(1)
        rows = torch.arange(len(ids))
        drawn = probabilities[rows, place].multinomial(1)[:, 0]
        ids[rows, place] = torch.where(certain[rows, place] < 0, ids[rows, place], drawn)
    return ids


def main() -> None:
    print("lines about animals, written by filling in masks after 800 steps of masked diffusion", flush=True)
    L.seed_everything(0)
    with tempfile.TemporaryDirectory() as folder:
        write_lines(Path(folder, "lines.jsonl"))
        data = TokenDataModule(
            Path(folder, "lines.jsonl"),
            TextEncoding(mask_probability="diffusion"),
            vocab_size=400,
            packing="none",
            batch_size=32,
            val_fraction=0.1,
            cache_dir=folder,
        )
        module = FusedMaskedLMModule(
            build_model(),
            optimizer=partial(AdamW, lr=4e-3, betas=(0.9, 0.99)),
            scheduler=partial(cosine_with_warmup, warmup_fraction=0.1),
        )
        trainer = L.Trainer(
            accelerator="cpu",
            max_steps=800,
            check_val_every_n_epoch=None,
            val_check_interval=400,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, data)
        print(f"val/loss {trainer.callback_metrics['val/loss']:.2f}: a bound on the nats of a token")
        tokenizer: Any = data.tokenizer
        length = len(tokenizer("at 7 the cow said moo")["input_ids"])
        rows = torch.full((100, length + 1), tokenizer.mask_token_id)
        rows[:, -1] = tokenizer.eos_token_id  # The end is no token of diffusion: it tells where a line stops.
        written = write(module.backbone.eval(), rows, tokenizer.mask_token_id)
        lines = tokenizer.batch_decode(written, skip_special_tokens=True)
        print(*lines[:5], sep="\n")
        right = sum(any(f"the {a} said {s}" in line for a, s in SOUNDS.items()) for line in lines)
        print(f"{right} of {len(lines)} lines are of an animal and its own sound")


if __name__ == "__main__":
    main()
