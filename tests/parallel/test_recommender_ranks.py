"""Recommenders in two processes, of which one has a user less, against one process over all users."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lightning_helpers import quiet_trainer
from parallel_cases import STRATEGIES, whole
from ranks import each
from transformers import get_constant_schedule

from lit_fused import BidirectionalItems, FusedRecommenderModule, SASRec
from lit_fused.data import InteractionDataModule
from lit_fused.parallel.placement import reshard

KINDS = ("causal", "weighted", "bidirectional")  # "weighted": interactions, and a bias of each item
CASES = [(strategy, kind) for kind in KINDS for strategy in ("ddp", "fsdp2")]
REFUSED = {
    ("tp", "causal"): "tensor parallelism divides a model of transformers",
    ("pp", "causal"): "strategy=pp cannot divide SASRec: it is no transformers model",
}
USERS, ITEMS, ROWS = 17, 42, 8  # The last batch of an evaluation has one user, so that one of two ranks has none.


def write_interactions(path: Path) -> None:
    random = np.random.default_rng(0)
    users = np.repeat(np.arange(USERS), random.integers(3, 12, USERS))
    items = np.concatenate([np.arange(ITEMS), random.integers(ITEMS, size=len(users))])[: len(users)]
    columns = {"user": users, "item": random.permutation(items), "timestamp": np.arange(len(users))}
    weights = random.integers(9, size=len(users)) / 8  # Their sums are exact in float32.
    pq.write_table(pa.table(columns | {"weight": weights}), path)


def fitted(case: tuple[str, str], processes: int, folder: Path) -> dict[str, Any]:
    """Return what two epochs, a validation and a test log, the weights, and the first users' recommendations."""
    strategy, kind = case
    weighted, encoder = kind == "weighted", BidirectionalItems if kind == "bidirectional" else SASRec
    torch.manual_seed(0)
    module = FusedRecommenderModule(
        encoder(ITEMS, hidden_size=16, num_layers=2, max_length=12, dropout=0.0),
        optimizer=partial(torch.optim.SGD, lr=0.5),
        scheduler=get_constant_schedule,
        popularity_correction=0.5 if weighted else 0.0,
        mask_fraction=1 - 1e-9,  # all items: nothing depends on random numbers of a rank
        top_k=3,
    ).double()
    trainer = quiet_trainer(folder, max_epochs=2, devices=processes, strategy=STRATEGIES[strategy][2]())
    data = InteractionDataModule(
        folder / "x.parquet", batch_size=ROWS // processes, weight_column="weight" if weighted else None
    )
    trainer.fit(module, data)
    logged = {f"fit: {name}": value for name, value in trainer.callback_metrics.items()}
    for evaluate in (trainer.validate, trainer.test):
        evaluate(module, data, verbose=False)
        logged |= trainer.callback_metrics
    reshard(module.model)  # as after a step of training
    histories = torch.arange(1, 13).view(3, 4)
    own = histories[: 3 - module.global_rank]  # Ranks may ask for different numbers of users.
    items = module.recommend(own, 3).items
    module.save_pretrained(folder / "exported")
    weights = whole(trainer.strategy, module, lambda p: p)
    if module.global_rank == 0:
        assert torch.equal(FusedRecommenderModule.from_folder(folder / "exported").recommend(own, 3).items, items)
    return {"logged": {n: v.item() for n, v in logged.items()}, "items": items, "weights": weights}


@pytest.mark.slow
def test_two_processes_train_rank_and_recommend_as_one_does_or_say_why_not(tmp_path):
    write_interactions(tmp_path / "x.parquet")
    found = each(fitted, 2, [*CASES, *REFUSED], 2, tmp_path, timeout=400)
    for kind in KINDS:
        alone = fitted(("single", kind), 1, tmp_path)
        for name in ("fit: train/loss", "val/ndcg_at_3", "test/recall_at_3", "test/mrr", "test/coverage_at_3"):
            assert name in alone["logged"]
        assert 0 < alone["logged"]["test/coverage_at_3"] < 1
        for case in (case for case in CASES if case[1] == kind):
            assert found[case]["logged"] == pytest.approx(alone["logged"], rel=1e-6), case
            assert torch.equal(found[case]["items"], alone["items"])
            for name, value in alone["weights"].items():
                torch.testing.assert_close(found[case]["weights"][name], value, rtol=1e-9, atol=1e-12)
    for case, message in REFUSED.items():
        assert message in found[case], case
