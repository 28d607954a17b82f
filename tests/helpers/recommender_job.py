"""The processes of test_recommender_ranks.py: a fit, a validation and a test of a recommender under each strategy.

    recommender_job.py FOLDER STRATEGY:KIND [...]

KIND is "causal", "weighted" (interactions and a bias of each item), "bidirectional", "resumed" (after its first epoch),
or one of OPTIONS; or "large", for the sizes of tensors. Rank 0 saves what was found.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from lightning_helpers import loader, quiet_trainer
from parallel_job import STRATEGIES, whole
from ranks import run_command
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import get_constant_schedule

from lit_fused import (
    BidirectionalItems,
    CrossEntropyLoss,
    FusedRecommenderModule,
    LinearCrossEntropyLoss,
    SASRec,
)
from lit_fused.data import InteractionDataModule
from lit_fused.modules import RowWiseAdagrad
from lit_fused.parallel import local
from lit_fused.parallel.placement import reshard

USERS, ITEMS, ROWS = 17, 42, 8  # The last batch of an evaluation has one user, so that one of two ranks has none.
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "smoothed": lambda: {
        "loss": LinearCrossEntropyLoss(label_smoothing=0.1, z_loss=1e-3),
        "optimizer": partial(RowWiseAdagrad, eps=1e-3),  # Some gradients are zero but for rounding.
        "trainer": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    },
    "standard": lambda: {"loss": CrossEntropyLoss()},
    "filtered": lambda: {"loss": always_filtered()},
    "cce": lambda: {"loss": LinearCrossEntropyLoss(impl="cce")},
}
MANY, SIZE = 20_000, 32  # a table that is larger than anything else in a step


def always_filtered() -> LinearCrossEntropyLoss:
    loss = LinearCrossEntropyLoss(filter_eps=0.0)
    loss.schedule.always = True
    return loss


class LargestTensor(L.Callback):
    """Notes the number of entries of the largest tensor that a training step makes, and how many tensors of more than
    ``large`` entries it allocates until its gradients are there."""

    def __init__(self, large: int) -> None:
        self.large, self.entries, self.made = large, 0, 0

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        found = self

        class Look(TorchDispatchMode):
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                results = function(*args, **(kwargs or {}))
                given, tensors = (
                    [t for t in tree_leaves(tree) if isinstance(t, Tensor) and not isinstance(t, DTensor)]
                    for tree in ((args, kwargs), results)
                )
                found.entries = max(found.entries, *(t.numel() for t in tensors), 0)
                if found.counts and not function.name().startswith("aten::set_"):
                    old = {t.untyped_storage().data_ptr() for t in given}
                    large = (t for t in tensors if t.numel() > found.large)
                    found.made += sum(t.untyped_storage().data_ptr() not in old for t in large)
                return results

        self.mode, self.counts = Look(), True
        self.mode.__enter__()

    def on_before_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.counts = False

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.mode.__exit__(None, None, None)


def largest_tensor(folder: Path, strategy: str) -> dict[str, Any]:
    """Return, for a step over many items, the entries of its largest tensor, of a rank's table, and of its state, and
    how many tensors larger than a third of the table it made before the optimiser's."""
    strategy, _, divided = strategy.partition("_")
    encoder = SASRec(MANY, hidden_size=SIZE, num_layers=1, max_length=4, dropout=0.0)
    adamw: Any = partial(torch.optim.AdamW, lr=0.1, foreach=False)
    module = FusedRecommenderModule(encoder, optimizer=adamw, parity_check=False, divide_items=bool(divided))
    ids = torch.randint(1, MANY, (2, 4))
    looks = LargestTensor(MANY * SIZE // 3)
    trainer = quiet_trainer(folder, max_steps=1, devices=2, strategy=STRATEGIES[strategy](), callbacks=[looks])
    trainer.fit(module, loader([{"input_ids": ids, "labels": ids}]))
    table: Any = module.backbone.get_parameter("item_embedding.weight")
    [state] = [local(s["exp_avg"]) for p, s in trainer.optimizers[0].state.items() if p is table]
    sizes = {"largest": looks.entries, "table": local(table).numel(), "state": state.numel()}
    dist.all_reduce(made := torch.tensor(looks.made), dist.ReduceOp.MAX)
    return sizes | {"made": int(made)}


def write_interactions(path: Path) -> None:
    random = np.random.default_rng(0)
    users = np.repeat(np.arange(USERS), random.integers(3, 12, USERS))
    items = np.concatenate([np.arange(ITEMS), random.integers(ITEMS, size=len(users))])[: len(users)]
    columns = {"user": users, "item": random.permutation(items), "timestamp": np.arange(len(users))}
    weights = random.integers(9, size=len(users)) / 8  # Their sums are exact in float32.
    pq.write_table(pa.table(columns | {"weight": weights}), path)


def fitted(folder: Path, kind: str, processes: int, strategy: str) -> dict[str, Any]:
    """Return what two epochs, a validation and a test log, the weights, and the first users' recommendations."""
    weighted, encoder = kind == "weighted", BidirectionalItems if kind == "bidirectional" else SASRec
    strategy, _, divided = strategy.partition("_")
    of_kind = OPTIONS.get(kind, dict)()

    def build(epochs: int) -> tuple[L.Trainer, FusedRecommenderModule]:
        torch.manual_seed(0)
        module = FusedRecommenderModule(
            encoder(ITEMS, hidden_size=16, num_layers=2, max_length=12, dropout=0.0),
            loss=of_kind.get("loss"),
            optimizer=partial(of_kind.get("optimizer", torch.optim.SGD), lr=0.5),
            scheduler=get_constant_schedule,
            item_bias=weighted,
            popularity_correction=0.5 if weighted else 0.0,
            mask_fraction=1 - 1e-9,  # all items: nothing depends on random numbers of a rank
            top_k=3,
            divide_items=bool(divided),
        ).double()
        options = of_kind.get("trainer", {})
        strategy_object = STRATEGIES[strategy]()
        return quiet_trainer(folder, max_epochs=epochs, devices=processes, strategy=strategy_object, **options), module

    data = InteractionDataModule(
        folder / "x.parquet", batch_size=ROWS // processes, weight_column="weight" if weighted else None
    )
    checkpoint = None
    if kind == "resumed":
        trainer, module = build(1)
        trainer.fit(module, data)
        trainer.save_checkpoint(checkpoint := folder / f"{strategy}{divided}.ckpt")
    trainer, module = build(2)
    trainer.fit(module, data, ckpt_path=checkpoint)
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


def run(case: str, folder: Path) -> dict[str, Any]:
    strategy, kind = case.split(":")
    return largest_tensor(folder, strategy) if kind == "large" else fitted(folder, kind, 2, strategy)


if __name__ == "__main__":
    run_command(run)
