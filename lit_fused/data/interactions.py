"""Read interactions of users with items, and keep them sorted by user and time.

Ids of any kind become numbers by their first appearance: items from 1 on, in the order of a map that is kept for later
runs, in which known items keep their numbers.
"""

import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from lit_fused.atomic import written_whole
from lit_fused.data.records import load_records
from lit_fused.errors import UserError

Numbers = npt.NDArray[Any]
pc: Any = pyarrow.compute  # Its functions are made when it is imported.


@dataclass(frozen=True)
class Interactions:
    """Interactions sorted by user and time; of equal times in the order of the file."""

    user_ids: pa.Array  # the users' own ids, in the order of their numbers
    item_ids: pa.Array  # the items' own ids; item i has the entry i - 1
    starts: Numbers  # (users + 1,) where each user's interactions begin
    items: Numbers  # (n,) numbers of items, from 1 on
    times: Numbers  # (n,) numbers that grow with time
    weights: Numbers | None  # (n,)

    @property
    def num_items(self) -> int:
        return len(self.item_ids)

    def history(self, user: int) -> Numbers:
        return self.items[self.starts[user] : self.starts[user + 1]]


def read_table(path: Path, columns: list[str]) -> pa.Table:
    """Return columns of what ``load_records`` reads. UserError: it has not all of them, or not in all rows."""
    records = load_records(path)
    if missing := [name for name in columns if name not in records.column_names]:
        raise UserError(
            f"{path} has no column {' and no column '.join(missing)}; it has {', '.join(records.column_names)}: name "
            "them by data.user_column, data.item_column, data.timestamp_column and data.weight_column"
        )
    table: pa.Table = records.select_columns(columns).with_format("arrow")[:]
    for name in columns:
        column = table[name]
        if column.type in (pa.string(), pa.large_string()):  # A cell of a CSV file that was left empty is "".
            column = pc.if_else(pc.equal(pc.utf8_trim_whitespace(column), ""), None, column)
        if column.null_count:
            raise UserError(f"{path}: {column.null_count} of {len(table)} rows have no {name}; fill it in")
    return table


def read_interactions(
    path: Path,
    user_column: str = "user",
    item_column: str = "item",
    timestamp_column: str = "timestamp",
    weight_column: str | None = None,
    known_items: pa.Array | None = None,
) -> Interactions:
    """Return the interactions in a file; items of ``known_items`` keep the numbers that they have there.

    UserError if ids or times are missing, or weights are no numbers of 0 or more.
    """
    table = read_table(path, [name for name in (user_column, item_column, timestamp_column, weight_column) if name])
    users, items = ids_of(table[user_column]), ids_of(table[item_column])
    times = table[timestamp_column]
    if not (pa.types.is_integer(times.type) or pa.types.is_floating(times.type)):
        times = times.cast(pa.timestamp("us")).cast(pa.int64())
    user_ids, item_ids = users.unique(), items.unique()
    if known_items is not None:
        known, item_ids = _of_one_type(known_items, item_ids)
        item_ids = pa.concat_arrays([known, item_ids.filter(pc.invert(pc.is_in(item_ids, known)))])
    rows = numbers_of(users, user_ids)
    order = np.lexsort((times.to_numpy(), rows))  # It is stable: equal times stay in the order of the file.
    weights = None
    if weight_column is not None:
        weights = table[weight_column].cast(pa.float32(), safe=False).to_numpy()[order]
        if bad := int((~(np.isfinite(weights) & (weights >= 0))).sum()):
            raise UserError(f"{path}: {bad} rows have a {weight_column} that is negative or no finite number")
    starts = np.concatenate([[0], np.bincount(rows, minlength=len(user_ids)).cumsum()])
    numbers = (numbers_of(items, item_ids) + 1)[order]
    return Interactions(user_ids, item_ids, starts, numbers, times.to_numpy()[order], weights)


def ids_of(column: pa.ChunkedArray) -> pa.Array:
    """Return a column of ids as integers, or as strings."""
    is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    return column.cast(pa.int64() if is_number else pa.string()).combine_chunks()


def _of_one_type(*ids: pa.Array) -> tuple[pa.Array, ...]:
    """Return ids as they are, or as strings where some are integers and some are strings."""
    return ids if len({part.type for part in ids}) == 1 else tuple(part.cast(pa.string()) for part in ids)


def numbers_of(values: pa.Array, known: pa.Array) -> Numbers:
    """Return the place of each value in ``known``, -1 for one that is not there, (n,) int64."""
    values, known = _of_one_type(values, known)
    return pc.fill_null(pc.index_in(values, known), -1).to_numpy(zero_copy_only=False).astype(np.int64)


def checksum_of(ids: pa.Array) -> int:
    """Return a checksum of ids and their order; integers have that of their digits."""
    _, offsets, text = pa.concat_arrays([ids.cast(pa.string())]).buffers()
    return zlib.crc32(memoryview(text or b""), zlib.crc32(memoryview(offsets or b"")))


@dataclass(frozen=True)
class ItemMap:
    """The items of a run by their numbers; item i has the entry i - 1 of ``item_ids``."""

    item_ids: pa.Array

    @property
    def item_numbers(self) -> dict[str, int]:
        """Return how many items there are, and a checksum of their numbers."""
        return {"count": len(self.item_ids), "checksum": checksum_of(self.item_ids)}

    def write_items(self, path: str | Path) -> None:
        """Write a Parquet file of "item" and "number", whole or not at all, that :func:`read_item_map` reads."""
        path, numbers = Path(path), np.arange(1, len(self.item_ids) + 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as partial:
            pq.write_table(pa.table({"item": self.item_ids, "number": numbers}), partial)


def read_item_map(path: Path) -> pa.Array:
    """Return the items' ids in the order of their numbers."""
    return ids_of(pq.read_table(path, columns=["item", "number"]).sort_by("number")["item"])


@dataclass(frozen=True)
class Histories:
    """Holds what users did so far: their own ids, and their items, numbers from 1 on, of known items alone."""

    user_ids: pa.Array
    items: list[Numbers]
    unknown_items: int = 0  # interactions that were left out
    unknown_users: int = 0


def histories_of(path: Path | None, columns: tuple[str, str, str], known: Interactions) -> Histories:
    """Return histories of the users in a file: those in it, if it has items, else those in ``known``; None for all.

    Of ``known`` items are those in ``item_ids``, which may be fewer than its interactions are with.
    """
    user, item, time = columns
    if path is not None and item in load_records(path).column_names:
        given = read_interactions(path, user, item, time, known_items=known.item_ids)
        return _of_known_items(given, known, np.arange(len(given.user_ids)))
    users = known.user_ids if path is None else ids_of(read_table(path, [user])[user]).unique()
    numbers = numbers_of(users, known.user_ids)
    found = _of_known_items(known, known, numbers[numbers >= 0])
    return replace(found, unknown_users=int((numbers < 0).sum()))


def _of_known_items(data: Interactions, known: Interactions, users: Numbers) -> Histories:
    rows = [data.history(user) for user in users]
    kept = [row[row <= known.num_items] for row in rows]
    return Histories(data.user_ids.take(pa.array(users)), kept, sum(map(len, rows)) - sum(map(len, kept)))


def write_recommendations(
    path: Path, user_ids: pa.Array, items: Numbers, scores: Numbers, item_ids: pa.Array
) -> pa.Table:
    """Write a Parquet file with a row for each "user" and "item", with "rank" from 1 on and "score", and return it.

    ``items`` are numbers (users, k), 0 for none, and ``scores`` (users, k).
    """
    rows, ranks = (items > 0).nonzero()
    of_users, of_items = user_ids.take(pa.array(rows)), item_ids.take(pa.array(items[rows, ranks] - 1))
    table = pa.table({"user": of_users, "item": of_items, "rank": ranks + 1, "score": scores[rows, ranks]})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return table
