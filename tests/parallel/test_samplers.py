"""Loaders of a project's own, which Lightning divides among ranks, keep their order and their batches."""

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lit_fused import UserError
from lit_fused.parallel import FSDP2Strategy
from lit_fused.parallel.samplers import keep_order, warn_of_repeated_rows
from lit_fused.pipeline import PipelineStrategy

ROWS: Any = list(range(6))
BACKWARDS: Any = [5, 4, 3, 2, 1, 0]
SHARED = {  # strategies whose ranks read the same batches
    "pp": lambda: PipelineStrategy(2),
    "tp": lambda: FSDP2Strategy(1, 2),
}


class Replicas:
    """Gives what a strategy says of its ranks, on the first of them, before there is a process group."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __get__(self, *_: Any) -> dict[str, int]:
        return {"num_replicas": self.number, "rank": 0}


class Plain:
    """Yields batches, and is no DataLoader."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.tensor([1, 2])])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def batches(strategy: Any, monkeypatch: pytest.MonkeyPatch, loader: Any, replicas: int = 2) -> list[list[int]]:
    """Return what the first of two ranks reads in training."""
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False)
    monkeypatch.setattr(type(trainer.strategy), "distributed_sampler_kwargs", Replicas(replicas))
    keep_order(trainer)
    divided: Any = trainer._data_connector._prepare_dataloader(loader, True, RunningStage.TRAINING)
    return [batch.tolist() for batch in divided]


def test_a_training_loader_that_does_not_shuffle_is_divided_in_its_order(monkeypatch):
    assert batches("ddp", monkeypatch, DataLoader(ROWS, 2)) == [[0, 2], [4]]
    assert batches("ddp", monkeypatch, DataLoader(ROWS, 2, sampler=BACKWARDS)) == [[5, 3], [1]]
    assert batches("ddp", monkeypatch, Plain()) == [[1, 2]]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_stream_with_a_batch_size_is_read_as_it_is(replicas, monkeypatch):
    stream: Any = DataLoader(Stream(), 2)
    assert batches("ddp", monkeypatch, stream, replicas) == [[0, 1], [2, 3], [4, 5]]
    warn_of_repeated_rows([stream], "val")


@pytest.mark.parametrize("strategy", SHARED)
def test_where_ranks_share_their_batches_a_loader_that_does_not_shuffle_stays_as_it_is(strategy, monkeypatch):
    in_order: Any = [[0, 1], [2, 3], [4, 5]]
    backwards = [[5, 4], [3, 2], [1, 0]]
    for loader, expected in (
        (DataLoader(ROWS, 2), in_order),
        (DataLoader(ROWS, 2, sampler=BACKWARDS), backwards),
        (DataLoader(ROWS, batch_sampler=BatchSampler(BACKWARDS, 2, drop_last=False)), backwards),
        (DataLoader(ROWS, batch_sampler=in_order), in_order),
    ):
        assert batches(SHARED[strategy](), monkeypatch, loader, replicas=1) == expected


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_loader_that_shuffles_is_shuffled_by_the_seed_that_all_ranks_have(replicas, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    first, second = (batches("ddp", monkeypatch, DataLoader(ROWS, 2, shuffle=True), replicas) for _ in range(2))
    rows = [row for batch in first for row in batch]
    assert first == second
    assert len({*rows}) == 6 // replicas
    assert rows != sorted(rows)


@pytest.mark.parametrize(
    "sampler",
    [
        BatchSampler(SequentialSampler(ROWS), 2, drop_last=False),
        BatchSampler(RandomSampler(ROWS), 2, drop_last=False),
        type("Buckets", (BatchSampler,), {})(WeightedRandomSampler([1] * 6, 6), 2, False),
    ],
)
def test_a_batch_sampler_whose_rows_or_sizes_would_be_lost_is_refused(sampler, monkeypatch):
    with pytest.raises(UserError, match=r"cannot divide the batches of \w+\(\w+\) among 2 ranks.*sampler= and batch_"):
        batches("ddp", monkeypatch, DataLoader(ROWS, batch_sampler=sampler))
