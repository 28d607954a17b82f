"""Train SASRec on a small catalogue that this script makes, and recommend: a minute on a CPU.

python examples/recommender.py
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.optim import AdamW

from lit_fused import FusedRecommenderModule, SASRec
from lit_fused.data import InteractionDataModule

ITEMS, USERS = 500, 1000


def write_interactions(path: Path) -> None:
    """Write users who walk through the catalogue in steps of their own, with some items at random."""
    random = np.random.default_rng(0)
    rows = []
    for user in range(USERS):
        item, step = random.integers(ITEMS), random.integers(1, 4)
        for time in range(random.integers(3, 30)):
            item = random.integers(ITEMS) if random.random() < 0.1 else (item + step) % ITEMS
            rows.append((f"user {user}", f"item {item}", time))
    users, items, times = zip(*rows, strict=True)
    pq.write_table(pa.table({"user": users, "item": items, "timestamp": times}), path)


def main() -> None:
    print("users who go on by one to three items, learned in 40 epochs", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "interactions.parquet")
        write_interactions(path)
        data = InteractionDataModule(path, max_length=30)
        torch.manual_seed(0)
        module = FusedRecommenderModule(
            SASRec(hidden_size=64, max_length=30), optimizer=partial(AdamW, lr=3e-3, weight_decay=0.01)
        )
        quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        quiet |= {"enable_model_summary": False, "check_val_every_n_epoch": 40}
        trainer = L.Trainer(max_epochs=40, accelerator="cpu", **quiet)
        trainer.fit(module, data)
        for name in ("val/ndcg_at_10", "val/recall_at_10", "val/coverage_at_10"):
            print(f"{name} {float(trainer.callback_metrics[name]):.3f}")
        names = data.interactions.item_ids
        history = torch.from_numpy(data.interactions.history(0).copy())
        items, _ = module.recommend(history[None, -30:], k=5, seen=[history])
        for what, numbers in (("had at last", history[-3:]), ("gets", items[0])):
            shown = (str(names[number - 1]) for number in numbers.tolist())
            print(f"{data.interactions.user_ids[0]} {what}: {', '.join(shown)}")


if __name__ == "__main__":
    main()
