"""``module=recommender`` and ``mode=recommend`` as a user types them: fit, test, export, recommend, grow."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from commands import export, summary, train
from composed import composed
from omegaconf import OmegaConf

from lit_fused.app.defaults import default_epochs, open_values

NAMES = ("userId", "itemId", "when", "stars")
COLUMNS = (
    "data.user_column=userId",
    "data.item_column=itemId",
    "data.timestamp_column=when",
    "data.weight_column=stars",
)
TINY = ("model.hidden_size=16", "model.num_layers=1", "trainer.accelerator=cpu", "precision=32-true")


def table(items: int, users: int = 60, prefix: str = "u") -> pa.Table:
    random = np.random.default_rng(0)
    rows = []
    for user in range(users):
        start = int(random.integers(items))
        most = int(random.integers(3, 9))
        rows += [(f"{prefix}{user}", f"i{(start + t) % items}", t, 0.5 + t / 10) for t in range(most)]
    return pa.table(dict(zip(NAMES, map(list, zip(*rows, strict=True)), strict=True)))


def pairs(rows: pa.Table, user: str = "user", item: str = "item") -> set[tuple[str, str]]:
    return {(row[user], row[item]) for row in rows.to_pylist()}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_is_fitted_tested_and_recommends_and_goes_on_with_a_catalogue_that_grew(tmp_path):
    pa_csv.write_csv(table(20), tmp_path / "x.csv")
    base = ("module=recommender", "data=interactions", "data.batch_size=16", *COLUMNS)
    fit = ("data.path=x.csv", "data.split=time", "trainer.max_steps=60", "optimizer.lr=1e-2", "test=true")
    found = train(tmp_path, *base, *TINY, *fit, "hydra.run.dir=run")
    for name in ("val/ndcg_at_10", "test/recall_at_10", "val/coverage_at_10", "test/mrr"):
        assert name in found.output
    users = pa.table({"userId": ["u1", "u2", "nobody"]})
    pq.write_table(users, tmp_path / "users.parquet")
    recommend = ("mode=recommend", "ckpt_path=run/checkpoints/last.ckpt", "recommend.k=4")
    found = train(tmp_path, *recommend, "recommend.users=users.parquet", "recommend.output=best.parquet")
    assert "users that the run does not know are left out: 1" in found.output
    best = pq.read_table(tmp_path / "best.parquet")
    assert best["rank"].to_pylist() == [1, 2, 3, 4] * 2
    assert not pairs(best) & pairs(table(20), *NAMES[:2])

    # The file grows where it lies, in another order; the run's items keep their numbers, and others are left out.
    pa_csv.write_csv(pa.concat_tables([table(26, prefix="v"), table(20)]), tmp_path / "x.csv")
    train(tmp_path, *recommend, "recommend.users=users.parquet", "recommend.output=again.parquet")
    assert pq.read_table(tmp_path / "again.parquet") == best
    (tmp_path / "histories.csv").write_text("userId,itemId,when\na,i3,1\na,i25,2\nb,i7,1\nc,what,1\n")
    found = train(tmp_path, *recommend, "recommend.users=histories.csv", "recommend.output=of_histories.parquet")
    assert "interactions with items that the run does not know are left out: 2" in found.output
    best = pq.read_table(tmp_path / "of_histories.parquet")
    assert best["user"].to_pylist() == ["a"] * 4 + ["b"] * 4 + ["c"] * 4  # c's are those of a history without items
    assert not pairs(best) & {("a", "i3"), ("b", "i7")}
    known = pq.read_table(tmp_path / "run/items.parquet")["item"].to_pylist()
    assert {*best["item"].to_pylist()} <= {*known} == {f"i{item}" for item in range(20)}

    grown = ("data.path=x.csv", "data.items=run/items.parquet", "model=exported_items", "model.path=run/exported")
    ranks = ("strategy=fsdp2", "trainer.devices=2", "trainer.max_steps=2")
    train(tmp_path, *base, *TINY[2:], *grown, *ranks, "hydra.run.dir=run2", ranks=2)
    numbers = pq.read_table(tmp_path / "run2/items.parquet")["item"].to_pylist()
    assert numbers[:20] == known
    assert len(numbers) == 26


def test_the_export_command_writes_a_recommender_with_its_items_as_its_run_did_also_without_the_data(tmp_path):
    pa_csv.write_csv(table(20), tmp_path / "x.csv")
    fit = ("module=recommender", "data=interactions", "data.batch_size=16", *COLUMNS, "data.path=x.csv")
    train(tmp_path, *fit, *TINY, "trainer.max_steps=2", "hydra.run.dir=run")
    (tmp_path / "x.csv").unlink()
    found = export(tmp_path, "run/checkpoints/last.ckpt", "model")
    assert found.output == "wrote model\n"
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "run" / "exported").iterdir()}
    items = pq.read_table(tmp_path / "run/items.parquet")
    pq.write_table(
        items.set_column(0, "item", items["item"].take([1, 0, *range(2, 20)])), tmp_path / "run/items.parquet"
    )
    found = export(tmp_path, "run/checkpoints/last.ckpt", "other", status=1)
    assert "items.parquet numbers the items otherwise than" in found.output
    assert "Traceback" not in found.output
    assert not (tmp_path / "other").exists()


def test_recommendations_need_a_checkpoint_of_a_recommender(tmp_path):
    found = train(tmp_path, "mode=recommend", status=1)
    assert "mode=recommend needs trained weights: give ckpt_path" in found.output


def test_a_recommender_trains_by_epochs_with_a_rate_that_moves_the_items_unless_steps_are_given():
    def trainer_of(*more: str) -> Any:
        cfg = composed("module=recommender", "data=interactions", "data.path=x.csv", *more)
        assert cfg.optimizer.get("weight_decay", 0) == 0
        found: Any = OmegaConf.to_container(cfg.trainer, resolve=True)
        return found | open_values(found, default_epochs(OmegaConf.to_container(cfg)))  # type: ignore[arg-type]

    by_default = trainer_of()
    assert by_default["max_epochs"] >= 10
    assert (by_default["max_steps"], by_default["check_val_every_n_epoch"]) == (-1, 1)
    steps = trainer_of("trainer.max_steps=2000")  # More than the default epochs may have.
    assert (steps["max_steps"], steps["max_epochs"]) == (2000, None)
    assert trainer_of("trainer.max_epochs=3")["max_epochs"] == 3


def walks(path: Path, users: int = 1500, items: int = 200) -> float:
    """Write users who mostly go on to one of two successors of an item, else by a skewed popularity. Return the
    NDCG@10 of the most popular items that a user had not, for each user's last item."""
    random = np.random.default_rng(0)
    popularity = 1 / (np.arange(items) + 5.0)
    popularity /= popularity.sum()
    successors = random.choice(items, (items, 2), p=popularity)
    rows, histories = [], []
    for user in range(users):
        history = [int(random.choice(items, p=popularity))]
        while len(history) < 10:
            follows = random.random() < 0.8
            item = int(successors[history[-1], random.integers(2)] if follows else random.choice(items, p=popularity))
            if item not in history:
                history.append(item)
        histories.append(history)
        rows += [(user, item, time) for time, item in enumerate(history)]
    columns = zip(*rows, strict=True)
    pq.write_table(pa.table(dict(zip(("user", "item", "timestamp"), map(list, columns), strict=True))), path)
    counts = np.bincount([item for history in histories for item in history[:-2]], minlength=items)
    gains = []
    for *before, target in histories:
        scores = np.where(np.isin(np.arange(items), before), -1, counts)
        place = int((scores > counts[target]).sum()) + 1
        gains.append(1 / np.log2(place + 1) if place <= 10 else 0.0)
    return float(np.mean(gains))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_first_command_of_the_page_ranks_twice_as_well_as_popularity(tmp_path):
    by_popularity = walks(tmp_path / "x.parquet")
    found = train(
        tmp_path, "module=recommender", "data=interactions", "data.path=x.parquet", "test=true", "hydra.run.dir=run"
    )
    assert "val NDCG@10" in found.output  # beside the loss, where language models have their perplexity
    assert "val perplexity" not in found.output
    ranked = summary(tmp_path / "run")
    assert ranked["metrics"]["test/ndcg_at_10"] > 2 * by_popularity
