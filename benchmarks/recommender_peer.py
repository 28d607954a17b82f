"""Train RePlay's SASRec with its own full softmax, as ``train.py module=recommender`` trains ours; print its ranking.

    python tools/recommender_libraries.py  # makes build/recommenders/replay, an environment with RePlay
    build/recommenders/replay/bin/python benchmarks/recommender_peer.py FILE.parquet --seed 1

FILE has the columns user, item and timestamp. Each user's last item is for the test and the one before is left out;
ranks are among all items that the user had not. Sizes, epochs, rows of a batch and the optimiser are those of RePlay's
example, and those of our first command: 64 numbers, 2 layers, 2 heads, 50 items of each user, 15 epochs, 128 rows,
Adam at 1e-3.
"""

import argparse
import time
from typing import Any

import numpy as np
import pandas as pd
import torch
from replay.data import FeatureHint, FeatureSource, FeatureType  # pyright: ignore[reportMissingImports]
from replay.data.nn import TensorFeatureInfo, TensorFeatureSource, TensorSchema  # pyright: ignore[reportMissingImports]
from replay.nn.sequential import SasRec  # pyright: ignore[reportMissingImports]
from torch import Tensor

LENGTH, WIDTH, ROWS = 50, 64, 128


def sequences(path: str) -> tuple[list[np.ndarray], int]:
    """Return the items of each user who has at least three, in the order of time, and the number of items."""
    data = pd.read_parquet(path).sort_values(["user", "timestamp"], kind="stable")
    data["item"] = pd.factorize(data["item"])[0]
    return [rows.to_numpy() for _, rows in data.groupby("user")["item"] if len(rows) > 2], len(set(data["item"]))


def padded(parts: list[np.ndarray], padding: int) -> Tensor:
    """Return the ends of sequences as one tensor (N, 50), padded at the left."""
    ends = [part[-LENGTH:] for part in parts]
    return torch.tensor(np.stack([np.pad(end, (LENGTH - len(end), 0), constant_values=padding) for end in ends]))


def model_of(items: int) -> Any:
    source = [TensorFeatureSource(FeatureSource.INTERACTIONS, "item_id")]
    kind: Any = {"feature_type": FeatureType.CATEGORICAL, "feature_hint": FeatureHint.ITEM_ID, "is_seq": True}
    sizes = {"cardinality": items, "padding_value": items, "embedding_dim": WIDTH}
    schema = TensorSchema([TensorFeatureInfo("item_id", feature_sources=source, **kind, **sizes)])
    model = SasRec.from_params(schema, WIDTH, num_heads=2, max_sequence_length=LENGTH, dropout=0.2)
    model.reset_parameters()
    return model


def fit(model: Any, users: list[np.ndarray], items: int, epochs: int) -> None:
    train = [user[:-2] for user in users if len(user) > 3]
    inputs, targets = (padded(parts, items) for parts in ([t[:-1] for t in train], [t[1:] for t in train]))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(inputs)).split(ROWS):
            batch: Any = {
                "feature_tensors": {"item_id": inputs[rows]},
                "padding_mask": inputs[rows] != items,
                "positive_labels": targets[rows, :, None],
                "negative_labels": None,
                "target_padding_mask": (targets[rows] != items)[..., None],
            }
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()


@torch.no_grad()
def ranks(model: Any, users: list[np.ndarray], items: int) -> np.ndarray:
    """Return how many unseen items score above each user's last one."""
    model.eval()
    found: list[int] = []
    for part in torch.arange(len(users)).split(256):
        histories = [users[i][:-1] for i in part]
        inputs = padded(histories, items)
        logits = model(feature_tensors={"item_id": inputs}, padding_mask=inputs != items)["logits"]
        last = logits[:, -1] if logits.dim() == 3 else logits
        for scores, history, i in zip(last, histories, part, strict=True):
            of_target = scores[users[i][-1]].item()
            scores[torch.tensor(history)] = -torch.inf
            found.append(int((scores > of_target).sum()))
    return np.array(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    users, items = sequences(options.data)
    model, begin = model_of(items), time.perf_counter()
    fit(model, users, items, options.epochs)
    seconds, found = time.perf_counter() - begin, ranks(model, users, items)
    ndcg, recall = np.where(found < 10, 1 / np.log2(found + 2), 0).mean(), (found < 10).mean()
    print(f"seed {options.seed}: NDCG@10 {ndcg:.4f}, recall@10 {recall:.4f}, {seconds / options.epochs:.1f} s an epoch")


if __name__ == "__main__":
    main()
