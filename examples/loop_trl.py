"""Fine-tune a model with TRL's SFTTrainer, on text and with a tokenizer that is made of it: ``fuse`` is the one line.

python examples/loop_trl.py

The trainer gives the model a head of TRL's own, so that it is fused after that. You see the mean loss of the steps and
that of one text, which are below that of guessing (ln 1000 = 6.9).
"""

import asyncio
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from project import build_model
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

import lit_fused


def main() -> None:
    print("TRL's SFTTrainer: ten steps", flush=True)
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    torch.manual_seed(0)
    texts = [file.read_text()[:4000] for file in sorted(Path(asyncio.__file__).parent.glob("*.py"))]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=1000, special_tokens=["<end>", "<pad>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<end>", pad_token="<pad>")
    model = build_model(vocab_size=1000)
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            folder,
            max_steps=10,
            max_length=128,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        data = Dataset.from_dict({"text": texts})
        trainer = SFTTrainer(model, args=settings, train_dataset=data, processing_class=tokenizer)
        lit_fused.fuse(model)
        trainer.train()
        print(f"train/loss {trainer.state.log_history[-1]['train_loss']:.4f}")
    ids = tokenizer(texts[0], return_tensors="pt", truncation=True, max_length=128)["input_ids"]
    with torch.no_grad():
        print(f"val/loss {model(input_ids=ids, labels=ids).loss:.4f}")


if __name__ == "__main__":
    main()
