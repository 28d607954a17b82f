"""Train an encoder-decoder on pairs: a tiny T5 learns to say the words of a line in the opposite order.

python examples/seq2seq.py
python examples/seq2seq.py reversed.jsonl   # only writes the pairs, for experiment=reverse

You see answers that the model writes by itself, and the share of held-out lines for which it writes exactly the right
one: none at first, most of them after training.
"""

import json
import random
import sys
import tempfile
from functools import partial
from pathlib import Path

import lightning as L
from generated_answers import GeneratedAnswers
from torch.optim import AdamW
from transformers import T5Config, T5ForConditionalGeneration

from lit_fused import FusedSeq2SeqLMModule
from lit_fused.data import PairEncoding, TokenDataModule
from lit_fused.training import cosine_with_warmup

WORDS = ["red", "green", "blue", "black", "white", "brown", "one", "two", "three", "four", "five", "six"]


def write_pairs(file: Path, count: int = 600) -> None:
    """Write pairs as lines of JSON: three to five different words, and the same in the opposite order."""
    choose, lines = random.Random(0), dict[tuple[str, ...], None]()
    while len(lines) < count:  # A source that occurs twice could be in both splits.
        lines[tuple(choose.sample(WORDS, choose.randint(3, 5)))] = None
    records = ({"source": " ".join(line), "target": " ".join(reversed(line))} for line in lines)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def build_model() -> T5ForConditionalGeneration:
    """Stands in for AutoModelForSeq2SeqLM.from_pretrained(NAME), whose tokenizer is TokenDataModule(tokenizer=NAME)."""
    config = T5Config(
        vocab_size=300,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        initializer_factor=0.5,
        eos_token_id=0,  # of the tokenizer that is trained on the pairs
        pad_token_id=1,
    )
    config.decoder_start_token_id = 1
    return T5ForConditionalGeneration(config)


def main() -> None:
    print("lines and their words in reverse, learned in 600 steps", flush=True)
    L.seed_everything(0)
    with tempfile.TemporaryDirectory() as folder:
        write_pairs(Path(folder, "reversed.jsonl"))
        data = TokenDataModule(
            Path(folder, "reversed.jsonl"),
            PairEncoding(),
            vocab_size=300,
            batch_size=32,
            val_fraction=0.1,
            cache_dir=folder,
        )
        module = FusedSeq2SeqLMModule(
            build_model(),
            optimizer=partial(AdamW, lr=4e-3, betas=(0.9, 0.99)),
            scheduler=partial(cosine_with_warmup, warmup_fraction=0.1),
        )
        trainer = L.Trainer(
            accelerator="cpu",
            max_steps=600,
            val_check_interval=200,
            check_val_every_n_epoch=None,
            gradient_clip_val=1.0,
            callbacks=[GeneratedAnswers(num_examples=64, num_shown=4)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, data)
        metrics = trainer.callback_metrics
        print(f"val/loss {metrics['val/loss']:.4f} val/exact_match {metrics['val/exact_match']:.2f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write_pairs(Path(sys.argv[1]))
    else:
        main()
