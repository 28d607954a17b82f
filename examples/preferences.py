"""Teach a small model to prefer right sums: make pairs, train by DPO, look at the margin.

    python examples/preferences.py [FOLDER]     FOLDER/pairs.jsonl is made and trained on

The same by the command: python train.py module=preference data=preference data.path=FOLDER/pairs.jsonl
"""

import json
import random
import sys
from functools import partial
from pathlib import Path

import lightning as L
from torch.optim import AdamW
from transformers import LlamaConfig

from lit_fused import FusedPreferenceModule, PreferenceLoss, from_config
from lit_fused.data import PreferenceEncoding, TokenDataModule


def write_pairs(file: Path, count: int = 200) -> None:
    """Write sums with a right answer, which is chosen, and a wrong one."""
    draw = random.Random(0)
    with file.open("w") as lines:
        for _ in range(count):
            a, b, error = draw.randint(1, 50), draw.randint(1, 50), draw.randint(1, 9)
            record = {"prompt": f"{a} plus {b} is", "chosen": f" {a + b}.", "rejected": f" {a + b + error}, I think."}
            lines.write(json.dumps(record) + "\n")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "preferences")
    folder.mkdir(parents=True, exist_ok=True)
    write_pairs(folder / "pairs.jsonl")
    data = TokenDataModule(
        folder / "pairs.jsonl",
        PreferenceEncoding(),
        block_size=64,
        vocab_size=512,
        cache_dir=folder / "cache",
    )
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    # The default rate, 1e-6, is for pretrained models.
    optimizer = partial(AdamW, lr=3e-4)
    module = FusedPreferenceModule(from_config(config, seed=0), PreferenceLoss("dpo", beta=0.1), optimizer)
    trainer = L.Trainer(
        max_steps=30,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, data)
    found = trainer.callback_metrics
    print(
        f"margin of the rewards {found['val/reward_margin']:.2f}, right in {found['val/reward_accuracy']:.0%} of pairs"
    )


if __name__ == "__main__":
    main()
