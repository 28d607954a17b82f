"""Pretrain a masked language model: a tiny EuroBERT learns to fill in words that are masked.

python examples/masked_lm.py

You see what the model puts in the place of a masked word, and the share of masked tokens of held-out lines that it
predicts: hardly any at first, most of them after training.
"""

import json
import tempfile
from functools import partial
from pathlib import Path

import lightning as L
from torch.optim import AdamW
from transformers import AutoModelForMaskedLM, AutoTokenizer, EuroBertConfig, EuroBertForMaskedLM, pipeline

from lit_fused import FusedMaskedLMModule
from lit_fused.data import TextEncoding, TokenDataModule
from lit_fused.training import cosine_with_warmup

SOUNDS = {"cow": "moo", "dog": "woof", "cat": "meow", "duck": "quack", "sheep": "baa", "pig": "oink", "owl": "hoot"}


def write_lines(file: Path) -> None:
    """Write 700 records: what an animal says, and when."""
    texts = [f"at {n} the {animal} said {sound}" for n in range(100) for animal, sound in SOUNDS.items()]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def build_model() -> EuroBertForMaskedLM:
    """Stands in for AutoModelForMaskedLM.from_pretrained(NAME), whose tokenizer is TokenDataModule(tokenizer=NAME)."""
    config = EuroBertConfig(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
        bos_token_id=0,  # of the tokenizer that is trained on the lines
        eos_token_id=0,
        pad_token_id=1,
        mask_token_id=2,
    )
    return EuroBertForMaskedLM(config)


def main() -> None:
    print("lines about animals, whose words are masked and learned in 600 steps", flush=True)
    L.seed_everything(0)
    with tempfile.TemporaryDirectory() as folder:
        write_lines(Path(folder, "lines.jsonl"))
        data = TokenDataModule(
            Path(folder, "lines.jsonl"),
            TextEncoding(mask_probability=0.2),
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
            max_steps=600,
            check_val_every_n_epoch=None,
            val_check_interval=300,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        [before] = trainer.validate(module, data, verbose=False)
        trainer.fit(module, data)
        after = trainer.callback_metrics
        print(f"val/accuracy {before['val/accuracy']:.2f} before training, {after['val/accuracy']:.2f} after")
        print(f"val/loss {before['val/loss']:.4f} before training, {after['val/loss']:.4f} after")
        module.save_pretrained(Path(folder, "exported"), data.tokenizer)
        model = AutoModelForMaskedLM.from_pretrained(Path(folder, "exported"))
        tokenizer = AutoTokenizer.from_pretrained(Path(folder, "exported"))
        fill = pipeline("fill-mask", model, tokenizer=tokenizer)
        for animal in list(SOUNDS)[:3]:
            print(fill(f"at 12 the{tokenizer.mask_token} said {SOUNDS[animal]}", top_k=1)[0]["sequence"])


if __name__ == "__main__":
    main()
