"""Pretrain from scratch: a tokenizer and a small Llama learn the sources of a few of Python's packages.

python examples/pretrain.py

You see a sample of noise before and one after that has the look of Python, a validation loss some two nats below that
of guessing (ln 2000 = 7.6), and what transformers loads from the folder that was exported.
"""

import asyncio
import tempfile
from functools import partial
from pathlib import Path

import lightning as L
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from lit_fused import FusedCausalLMModule, from_config
from lit_fused.callbacks import ExportPretrained, SampleText
from lit_fused.data import TextEncoding, TokenDataModule


def main() -> None:
    print("a tokenizer and a model, trained on the sources of asyncio in 120 steps", flush=True)
    L.seed_everything(0)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(asyncio.__file__).parent
        data = TokenDataModule(source, TextEncoding(), block_size=128, batch_size=8, vocab_size=2000, cache_dir=folder)
        config = LlamaConfig(
            vocab_size=2000,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=0,  # of the tokenizer that is trained on the text
            eos_token_id=0,
            pad_token_id=1,
        )
        module = FusedCausalLMModule(from_config(config, seed=0), optimizer=partial(AdamW, lr=5e-3))
        exported = Path(folder, "model")
        trainer = L.Trainer(
            accelerator="cpu",
            max_steps=120,
            gradient_clip_val=1.0,
            callbacks=[SampleText("    def __init__(self", max_new_tokens=32), ExportPretrained(exported)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, data)
        trainer.validate(module, data, verbose=False)
        metrics = trainer.callback_metrics
        print(f"val/loss {metrics['val/loss']:.4f} val/perplexity {metrics['val/perplexity']:.0f}")

        model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
        print(f"exported: {type(model).__name__} of {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
