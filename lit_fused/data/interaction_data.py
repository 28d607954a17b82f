"""The data module of sequential recommenders: each user's items in their order, and which of them are held out."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import Dataset

from lit_fused.data.interactions import Interactions, ItemMap, Numbers, checksum_of, read_interactions, read_item_map
from lit_fused.data.loader import BatchDataModule, BatchLoader, pad_right
from lit_fused.errors import UserError, check_choice, checked_options
from lit_fused.ops.label_checks import IGNORE_INDEX


@dataclass(frozen=True)
class _Windows(Dataset[dict[str, Any]]):
    """Parts of users' sequences: the items [begin, end), of which those from ``label`` on are to be predicted."""

    of: Interactions
    users: Numbers
    begins: Numbers
    labels: Numbers
    ends: Numbers
    length: int  # the most items
    seen_before: Numbers | None  # "seen" has the user's items before these; None: rows have no "seen"

    @classmethod
    def covering(
        cls, of: Interactions, labels: Numbers, ends: Numbers, length: int, *, exclude_seen: bool
    ) -> "_Windows":
        """Cut windows of at most ``length`` items so that each item in [labels, ends), of every user, is predicted in
        one of them, with the items before it, back from the last."""
        labels = np.maximum(labels, of.starts[:-1] + 1)  # Nothing is before the first item of a user.
        counts = np.maximum(-(-(ends - labels) // (length - 1)), 0)
        place = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        users = np.repeat(np.arange(len(counts)), counts)
        ends = ends[users] - place * (length - 1)
        labels = np.maximum(labels[users], ends - length + 1)
        begins = np.maximum(ends - length, of.starts[users])
        return cls(of, users, begins, labels, ends, length, labels if exclude_seen else None)

    def share_left_out(self) -> float:
        """Return the share of items to be predicted that no ranking has, because the user had them before."""
        if self.seen_before is None or not len(self):
            return 0.0
        users = np.repeat(np.arange(len(self.of.user_ids)), np.diff(self.of.starts))
        pairs = users * (self.of.num_items + 1) + self.of.items
        _, first, numbers = np.unique(pairs, return_index=True, return_inverse=True)
        counts = self.ends - self.labels
        places = np.arange(counts.sum()) + np.repeat(self.ends - counts.cumsum(), counts)
        return float((first[numbers[places]] < np.repeat(self.labels, counts)).mean())

    def __len__(self) -> int:
        return len(self.users)

    def __getitem__(self, index: int) -> dict[str, Any]:
        begin, label, end = (int(part[index]) for part in (self.begins, self.labels, self.ends))
        items = torch.from_numpy(self.of.items[begin:end].copy())
        labels = items.clone()
        labels[: label - begin] = IGNORE_INDEX
        row: dict[str, Any] = {"input_ids": items, "labels": labels}
        if self.of.weights is not None:
            row["token_weights"] = torch.from_numpy(self.of.weights[begin:end].copy())
        if self.seen_before is not None:
            start = self.of.starts[self.users[index]]
            row["seen"] = torch.from_numpy(np.unique(self.of.items[start : self.seen_before[index]]))
        return row


class InteractionDataModule(BatchDataModule):
    """Batches of users' items in their order: "input_ids" and "labels", int64 (B, T), items from 1 on, 0 for padding.

    ``split="leave_one_out"`` tests on each user's last item, validates on the one before and trains on the others;
    users with fewer than three interactions are for training alone. ``split="time"`` tests on the last
    ``test_fraction`` of all interactions and validates on the ``val_fraction`` before them. Batches of both have "seen"
    (B, S), what each user had before the first label of the row, which metrics leave out. Prediction has the last
    ``max_length`` items of every user, without labels, and all that the user had as "seen".

    Args:
        path: What :func:`lit_fused.data.records.load_records` reads, a row for each interaction.
        user_column, item_column: Ids, integers or strings. In CSV, ids of digits alone are numbers: 007 is 7.
        timestamp_column: Numbers, dates or times; equal ones keep the order of the file.
        weight_column: Weights of interactions, at least 0; None for none.
        split: "leave_one_out" or "time".
        val_fraction, test_fraction: Of the interactions, for ``split="time"``.
        max_length: The most items of a sequence; longer ones are cut into several.
        batch_size: Sequences per batch.
        items: The map of an earlier run, RUN/items.parquet, whose items keep their numbers; new ones come after them.
        exclude_seen: Leave items that a user had before out of rankings. False where people take things again.
        num_workers: Processes that make batches.
        seed: Of the order of training batches.
        folder: Where the map of the items is written; None: nowhere.

    ``setup`` raises UserError for data that are missing, bad, or too few.
    """

    tokenizer = None

    @checked_options("data.", max_length=2)
    def __init__(
        self,
        path: str | Path,
        user_column: str = "user",
        item_column: str = "item",
        timestamp_column: str = "timestamp",
        weight_column: str | None = None,
        split: str = "leave_one_out",
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        max_length: int = 50,
        batch_size: int = 128,
        items: str | Path | None = None,
        exclude_seen: bool = True,
        num_workers: int = 0,
        seed: int = 0,
        folder: str | Path | None = None,
    ) -> None:
        super().__init__(batch_size, num_workers, seed)
        check_choice("data.split", split, ("leave_one_out", "time"))
        self.path, self.items, self.folder = Path(path), items, folder
        self.columns = user_column, item_column, timestamp_column, weight_column
        self.split, self.fractions, self.max_length = split, (val_fraction, test_fraction), max_length
        self.exclude_seen = exclude_seen
        self._parts: dict[str, _Windows] = {}

    @cached_property
    def interactions(self) -> Interactions:
        known = None if self.items is None else read_item_map(Path(self.items))
        return read_interactions(self.path, *self.columns, known_items=known)

    @property
    def num_items(self) -> int:
        return self.interactions.num_items

    @property
    def source_names(self) -> list[str]:
        return [str(self.path)]

    @property
    def popularity(self) -> Tensor:
        """Return how often each item is in the training sequences, (items,) float64; interactions by their weight."""
        data, train = self.interactions, self._parts["train"]
        used = np.zeros(len(data.items) + 1, dtype=np.int64)
        np.add.at(used, train.begins, 1)
        np.add.at(used, train.ends, -1)
        weights = np.minimum(used.cumsum()[:-1], 1) * (1.0 if data.weights is None else data.weights)
        return torch.from_numpy(np.bincount(data.items - 1, weights, minlength=data.num_items))

    @property
    def item_map(self) -> ItemMap:
        """Return the items by their numbers, for checkpoints and exports."""
        return ItemMap(self.interactions.item_ids)

    def check_item_numbers(self, theirs: Mapping[str, int]) -> None:
        """Raise a UserError if items that a model has learned have other numbers here; new ones may come after them."""
        items, count = self.interactions.item_ids, theirs["count"]
        if count > len(items) or checksum_of(items[:count]) != theirs["checksum"]:
            raise UserError(
                f"the items of {self.path} are numbered otherwise than in the checkpoint or export, by their first "
                "appearance; give the map of its run: data.items=RUN/items.parquet (in Python items=)"
            )

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"items": self.item_map.item_numbers}

    def see_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuse items of other numbers before weights of other shapes. ``FusedLMModule`` calls this."""
        if state := checkpoint.get(type(self).__qualname__):
            self.load_state_dict(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.check_item_numbers(state_dict["items"])
        super().load_state_dict(state_dict)

    def setup(self, stage: str | None = None) -> None:
        if self._parts:
            return
        data = self.interactions
        starts, ends = data.starts[:-1], data.starts[1:]
        if self.split == "leave_one_out":
            train_ends, val_ends = (np.where(ends - starts >= 3, ends - left, ends) for left in (2, 1))
        else:
            val_fraction, test_fraction = self.fractions
            moments = np.quantile(data.times, [1 - val_fraction - test_fraction, 1 - test_fraction], method="higher")
            before = [np.concatenate([[0], (data.times < moment).cumsum()]) for moment in moments]
            train_ends, val_ends = (starts + np.diff(count[data.starts]) for count in before)
        cuts = {"train": (starts, train_ends), "val": (train_ends, val_ends), "test": (val_ends, ends)}
        for name, (first, last) in cuts.items():
            seen = self.exclude_seen and name != "train"
            self._parts[name] = _Windows.covering(data, first, last, self.max_length, exclude_seen=seen)
            if name != "test" and not len(self._parts[name]):
                raise UserError(f"{self.path} has nothing for data.split={self.split} to {name} on; give more of them")
            if share := self._parts[name].share_left_out():
                rank_zero_info(
                    f"{share:.1%} of the {name} items are ones that their users had before, which rankings leave out: "
                    "they cannot be found; data.exclude_seen=false ranks them"
                )

    def train_dataloader(self) -> BatchLoader:
        # A checkpoint whose items have other numbers has been refused by now, so that its run keeps its map.
        if self.folder is not None and getattr(self.trainer, "is_global_zero", True):
            self.item_map.write_items(Path(self.folder) / "items.parquet")
        return self.training_batches(self._parts["train"], pad_right)

    def val_dataloader(self) -> BatchLoader:
        return self.evaluation_batches(self._parts["val"], pad_right)

    def test_dataloader(self) -> BatchLoader:
        return self.evaluation_batches(self._parts["test"], pad_right)

    def predict_dataloader(self) -> BatchLoader:
        data, users = self.interactions, np.arange(len(self.interactions.user_ids))
        starts, ends = data.starts[:-1], data.starts[1:]
        seen = ends if self.exclude_seen else starts
        rows = _Windows(data, users, np.maximum(ends - self.max_length, starts), ends, ends, self.max_length, seen)
        return self.evaluation_batches(rows, pad_right)
