"""Interactions: what is held out, what the windows cover, ids of every kind, and files that are not as expected."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import torch

from lit_fused import UserError
from lit_fused.data import InteractionDataModule
from lit_fused.data.interactions import read_interactions, read_item_map


def write(
    folder: Path, rows: list[tuple[Any, ...]], names: str = "user item timestamp", name: str = "x.parquet"
) -> Path:
    path = folder / name
    columns = dict(zip(names.split(), zip(*rows, strict=True), strict=True))
    table = pa.table({key: list(values) for key, values in columns.items()})
    if path.suffix == ".csv":
        pa_csv.write_csv(table, path)
    else:
        pq.write_table(table, path)
    return path


def random_rows(users: int = 20, items: int = 30, most: int = 15, seed: int = 0) -> list[tuple[str, int, int]]:
    random = np.random.default_rng(seed)
    rows = [
        (f"u{user}", int(random.integers(items)) * 1000, int(random.integers(50)))
        for user in range(users)
        for _ in range(random.integers(1, most))
    ]
    return [rows[place] for place in random.permutation(len(rows))]


def sequences(rows: list[tuple[str, int, int]]) -> dict[str, list[tuple[int, int]]]:
    """Each user's items and times in order; equal times in the order of the rows."""
    found: dict[str, list[tuple[int, int]]] = {}
    for user, item, time in rows:
        found.setdefault(user, []).append((item, time))
    return {user: sorted(pairs, key=lambda pair: pair[1]) for user, pairs in found.items()}


def predicted(loader: Any, data: InteractionDataModule) -> list[tuple[list[int], int]]:
    """All (items before, the item) that the batches of a loader ask for, by the items' own ids."""
    ids = data.interactions.item_ids.to_pylist()
    pairs = []
    for batch in loader:
        for row, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
            for place in range(1, len(row)):
                if labels[place] > 0:
                    assert labels[place] == row[place]
                    pairs.append(([ids[item - 1] for item in row[:place]], ids[row[place] - 1]))
    return pairs


@pytest.mark.parametrize("length", [50, 4, 2])
def test_leave_one_out_predicts_each_item_once_from_those_before_it(tmp_path, length):
    rows = random_rows()
    data = InteractionDataModule(write(tmp_path, rows), max_length=length, batch_size=7)
    data.setup()
    expected: dict[str, list[tuple[int, int]]] = {"train": [], "val": [], "test": []}
    for pairs in sequences(rows).values():
        items = [item for item, _ in pairs]
        parts = (len(items) - 2, len(items) - 1) if len(items) >= 3 else (len(items), len(items))
        for place in range(1, len(items)):
            part = "train" if place < parts[0] else "val" if place < parts[1] else "test"
            expected[part].append((items[place - 1], items[place]))
    for part, loader in (("val", data.val_dataloader()), ("test", data.test_dataloader())):
        found = [(before[-1], item) for before, item in predicted(loader, data)]
        assert sorted(found) == sorted(expected[part])
    found = [(row["input_ids"], row["labels"]) for row in data._parts["train"]]
    assert all(len(ids) <= length for ids, _ in found)
    assert sum(int((labels > 0).sum()) for _, labels in found) == len(expected["train"])


def test_a_split_by_time_predicts_what_came_later_from_what_came_before(tmp_path):
    rows = [(user, item, 1000 * place + int(user[1:])) for place, (user, item, _) in enumerate(random_rows())]
    data = InteractionDataModule(write(tmp_path, rows), split="time", val_fraction=0.2, test_fraction=0.3)
    data.setup()
    times = sorted(time for _, _, time in rows)
    moments = tuple(times[math.ceil(share * (len(times) - 1))] for share in (1 - 0.2 - 0.3, 1 - 0.3))
    by_part: dict[str, int] = {"train": 0, "val": 0, "test": 0}
    for pairs in sequences(rows).values():
        for _, time in pairs[1:]:
            by_part["train" if time < moments[0] else "val" if time < moments[1] else "test"] += 1
    for part, count in by_part.items():
        windows = data._parts[part]
        assert sum(int((row["labels"] > 0).sum()) for row in windows) == count > 0
        for index, user in enumerate(windows.users if part != "train" else ()):
            own = slice(*data.interactions.starts[user : user + 2])
            before = max(1, int((data.interactions.times[own] < moments[part == "test"]).sum()))
            assert windows[index]["seen"].tolist() == sorted({*data.interactions.items[own][:before].tolist()})


@pytest.mark.parametrize("options", [{}, {"split": "time", "val_fraction": 0.4}, {"max_length": 3, "split": "time"}])
def test_the_share_of_items_that_no_ranking_can_have_is_said(tmp_path, caplog, options):
    path = write(tmp_path, random_rows(items=6))
    with caplog.at_level("INFO"):
        data = InteractionDataModule(path, **options)
        data.setup()
    for part in ("val", "test"):
        rows = [*data._parts[part]]
        lost = sum(int(torch.isin(row["labels"], row["seen"]).sum()) for row in rows)
        share = lost / sum(int((row["labels"] > 0).sum()) for row in rows)
        assert share > 0.1
        assert f"{share:.1%} of the {part} items are ones that their users had before" in caplog.text
    caplog.clear()
    InteractionDataModule(path, exclude_seen=False, **options).setup()
    assert "had before" not in caplog.text


def test_prediction_has_the_last_items_of_every_user_and_all_that_they_had_unless_they_may_have_it_again(tmp_path):
    rows = random_rows()
    for exclude_seen in (True, False):
        data = InteractionDataModule(write(tmp_path, rows), max_length=4, batch_size=7, exclude_seen=exclude_seen)
        data.setup()
        ids, found = data.interactions.item_ids.to_pylist(), []
        for batch in data.predict_dataloader():
            assert (batch["labels"] == -100).all()
            for items, seen in zip(batch["input_ids"].tolist(), batch["seen"].tolist(), strict=True):
                found.append(([ids[item - 1] for item in items if item], {ids[item - 1] for item in seen if item}))
        histories = [[item for item, _ in pairs] for pairs in sequences(rows).values()]
        assert found == [(items[-4:], {*items} if exclude_seen else set()) for items in histories]


def test_another_order_of_the_file_is_refused_where_a_checkpoint_is_loaded_and_new_items_may_come_last(tmp_path):
    rows = random_rows()
    path = write(tmp_path, rows)
    state = InteractionDataModule(path).state_dict()
    more = [*rows, ("new", 123456, 1)]
    for same in (rows, more):
        InteractionDataModule(write(tmp_path, same, name="y.parquet")).load_state_dict(state)
    folder = tmp_path / "run"
    InteractionDataModule(path).item_map.write_items(folder / "items.parquet")
    other = write(tmp_path, more[::-1], name="y.parquet")
    InteractionDataModule(other, items=folder / "items.parquet").load_state_dict(state)
    for changed in (other, write(tmp_path, rows[:20], name="z.parquet")):
        with pytest.raises(UserError, match=r"numbered otherwise than in the checkpoint.*data.items=RUN/items.parquet"):
            InteractionDataModule(changed).load_state_dict(state)


def test_ids_and_times_of_every_kind_and_equal_times_keep_the_order_of_the_file(tmp_path):
    kinds: list[tuple[Any, Any]] = [("a", "2024-01-02"), (7, 3), (7.0, 3.5), ("b", "2024-01-02 10:00:00")]
    for place, (item, time) in enumerate(kinds):
        rows = [(1, item, time), (1, item + item, time), (1, item, time)]
        for name in (f"{place}.parquet", f"{place}.csv"):
            found = read_interactions(write(tmp_path, rows, name=name))
            assert found.items.tolist() == [1, 2, 1]
            assert len(found.item_ids) == 2
    table = pa.table({"user": [1, 1], "item": pa.array(["x", "y"]).dictionary_encode(), "timestamp": [2, 1]})
    pq.write_table(table, tmp_path / "dictionary.parquet")
    assert read_interactions(tmp_path / "dictionary.parquet").items.tolist() == [2, 1]


def test_a_catalogue_that_grew_keeps_the_numbers_of_known_items(tmp_path):
    data = InteractionDataModule(write(tmp_path, random_rows()), folder=tmp_path / "run")
    data.setup()
    data.train_dataloader()
    known = read_item_map(tmp_path / "run" / "items.parquet").to_pylist()
    more = [*random_rows(seed=1), ("new", 5, 1), ("new", 6, 2)]
    grown = InteractionDataModule(write(tmp_path, more, name="y.parquet"), items=tmp_path / "run" / "items.parquet")
    assert grown.interactions.item_ids.to_pylist()[: len(known)] == known
    assert set(grown.interactions.item_ids.to_pylist()) == {*known, *(item for _, item, _ in more)}
    history = grown.interactions.history(grown.interactions.user_ids.to_pylist().index("new"))
    assert [grown.interactions.item_ids[int(number) - 1].as_py() for number in history] == [5, 6]


def test_weights_stay_with_their_interactions_and_popularity_counts_those_of_training(tmp_path):
    rows = [("a", item, item, item / 10) for item in (1, 2, 3, 4)] + [("b", 9, 0, 1.0)]
    path = write(tmp_path, rows, "user item timestamp weight")
    data = InteractionDataModule(path, weight_column="weight", batch_size=1)
    data.setup()
    row = data._parts["train"][0]
    assert torch.equal(row["token_weights"], torch.tensor([0.1, 0.2]))
    assert data.popularity.tolist() == pytest.approx([0.1, 0.2, 0, 0, 0])


def test_bad_files_are_sentences(tmp_path):
    def fails(match: str, rows: list[tuple[Any, ...]], names: str = "user item timestamp", **options: Any) -> None:
        with pytest.raises(UserError, match=match):
            InteractionDataModule(write(tmp_path, rows, names), **options).setup()

    fails("has no column item; it has user, thing, timestamp", [(1, 2, 3)], "user thing timestamp")
    fails("1 of 2 rows have no item", [(1, 2, 3), (1, None, 3)])
    fails("1 of 2 rows have no item", [(1, " ", 3), (1, "a", 3)])
    (tmp_path / "blank.csv").write_text("user,item,timestamp\n1,a,1\n1,,2\n")
    with pytest.raises(UserError, match="1 of 2 rows have no item"):
        InteractionDataModule(tmp_path / "blank.csv").setup()
    weighted = "user item timestamp w"
    fails("1 rows have a w that is negative", [(1, 2, 3, -1.0)], weighted, weight_column="w")
    fails("has nothing for data.split=leave_one_out to train on", [(1, 2, 3), (2, 2, 3)])
    fails("has nothing for data.split=leave_one_out to val on", [(1, 2, 3), (1, 3, 4)])
    with pytest.raises(UserError, match="there is no file or folder"):
        InteractionDataModule(tmp_path / "none.parquet").setup()
