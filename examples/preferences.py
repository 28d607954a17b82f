"""Teach a small model to prefer right sums: make pairs, train by DPO, look at pairs of sums that it has not seen.

    python examples/preferences.py [FOLDER]     FOLDER/pairs.jsonl and FOLDER/validation.jsonl are made

The same by the command: python train.py module=preference data=preference data.path=FOLDER/pairs.jsonl

The rejected answer is the right one of another sum. So nothing about an answer alone tells which of the two is right: a
model that does not read the prompt is right in half of the pairs.
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

SUMS = [(a, b) for a in range(10) for b in range(10)]
UNSEEN = 20  # sums of which there are validation pairs alone


def write_pairs(file: Path, sums: list[tuple[int, int]], for_each: int, seed: int) -> int:
    """Write some pairs for each sum, and return how many: its answer, which is chosen, and that of another sum."""
    draw = random.Random(seed)
    pairs = [(a, b, draw.choice([x + y for x, y in SUMS if x + y != a + b])) for a, b in sums for _ in range(for_each)]
    records = [{"prompt": f"{a} plus {b} is", "chosen": f" {a + b}.", "rejected": f" {c}."} for a, b, c in pairs]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return len(records)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "preferences")
    folder.mkdir(parents=True, exist_ok=True)
    sums = random.Random(0).sample(SUMS, len(SUMS))
    trained = write_pairs(folder / "pairs.jsonl", sums[UNSEEN:], for_each=20, seed=1)
    unseen = write_pairs(folder / "validation.jsonl", sums[:UNSEEN], for_each=10, seed=2)
    print(
        f"{trained} pairs of {len(SUMS) - UNSEEN} sums to train on, {unseen} pairs of {UNSEEN} other sums to validate",
        flush=True,
    )
    data = TokenDataModule(
        folder / "pairs.jsonl",
        PreferenceEncoding(),
        val_source=folder / "validation.jsonl",
        block_size=64,
        batch_size=16,
        vocab_size=512,
        cache_dir=folder / "cache",
    )
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    # The default rate, 1e-6, is for pretrained models.
    optimizer = partial(AdamW, lr=1e-3)
    module = FusedPreferenceModule(from_config(config, seed=0), PreferenceLoss("dpo", beta=0.1), optimizer)
    trainer = L.Trainer(
        max_steps=300,
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
        f"margin of the rewards {found['val/reward_margin']:.2f}, "
        f"right in {found['val/reward_accuracy']:.0%} of the validation pairs, 50% by chance"
    )


if __name__ == "__main__":
    main()
