"""``module=recommender`` and ``mode=recommend`` as a user types them: fit, test, export, recommend, grow."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import train


def write(path: Path, items: int, users: int = 60, prefix: str = "u") -> None:
    random = np.random.default_rng(0)
    rows = []
    for user in range(users):
        start = int(random.integers(items))
        rows += [(f"{prefix}{user}", f"i{(start + t) % items}", t) for t in range(int(random.integers(3, 9)))]
    columns = dict(zip(("user", "item", "timestamp"), map(list, zip(*rows, strict=True)), strict=True))
    pq.write_table(pa.table(columns), path)


TINY = ("model.hidden_size=16", "model.num_layers=1", "trainer.accelerator=cpu", "precision=32-true")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_is_fitted_tested_and_recommends_and_goes_on_with_a_catalogue_that_grew(tmp_path):
    write(tmp_path / "x.parquet", 20)
    base = ("module=recommender", "data=interactions", "data.batch_size=16")
    fit = ("data.path=x.parquet", "trainer.max_steps=60", "optimizer.lr=1e-2", "test=true", "hydra.run.dir=run")
    found = train(tmp_path, *base, *TINY, *fit)
    assert found.status == 0, found.output
    for name in ("val/ndcg_at_10", "test/recall_at_10", "val/coverage_at_10", "test/mrr"):
        assert name in found.output
    users = pa.table({"user": ["u1", "u2", "nobody"]})
    pq.write_table(users, tmp_path / "users.parquet")
    recommend = ("mode=recommend", "ckpt_path=run/checkpoints/last.ckpt", "recommend.k=4")
    found = train(tmp_path, *recommend, "recommend.users=users.parquet", "recommend.output=best.parquet")
    assert found.status == 0, found.output
    assert "users that the run's data do not have are left out: 1" in found.output
    best = pq.read_table(tmp_path / "best.parquet").to_pylist()
    assert [row["rank"] for row in best] == [1, 2, 3, 4] * 2
    had = pq.read_table(tmp_path / "x.parquet").to_pylist()
    assert not {(row["user"], row["item"]) for row in best} & {(row["user"], row["item"]) for row in had}
    write(tmp_path / "y.parquet", 26, prefix="v")
    grown = ("data.path=y.parquet", "data.items=run/items.parquet", "model=exported_items", "model.path=run/exported")
    found = train(tmp_path, *base, *TINY[2:], *grown, "trainer.max_steps=2", "hydra.run.dir=run2")
    assert found.status == 0, found.output
    numbers = pq.read_table(tmp_path / "run2/items.parquet")["item"].to_pylist()
    assert numbers[:20] == pq.read_table(tmp_path / "run/items.parquet")["item"].to_pylist()
    assert len(numbers) == 26


def test_recommendations_need_a_checkpoint_of_a_recommender(tmp_path):
    found = train(tmp_path, "mode=recommend")
    assert "mode=recommend needs trained weights: give ckpt_path" in found.output
