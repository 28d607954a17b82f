"""Load batches in an order that (seed, epoch) alone decides, so that training can resume in the middle of an epoch.

Nothing about the order is state. Epoch e is a permutation of the samples drawn from (seed, e); batch m of all ranks
together is its rows ``[m * G, (m + 1) * G)``, where G is the batch size times the number of ranks that train on
different data. Lightning saves which epoch and which batch comes next, which suffices on every rank, however far
workers have read ahead. With another G the count of batches is converted, if it stays whole.

Every rank has the same number of batches, of the same number of rows. Where the samples do not suffice, a rank's batch
is filled up with rows whose labels are all ignored, so that sums and counts are those of each sample once.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

from lit_fused.errors import UserError, checked_options
from lit_fused.ops.label_checks import IGNORE_INDEX

Collate = Callable[[list[Any]], Any]
# Samples with stored scores (see stored_scores.py) have these besides, filled up by these numbers.
SCORES = {"teacher_entries": -1, "teacher_log_probs": 0.0, "teacher_target_log_prob": 0.0}
_ROWS = "data.batch_size times devices"


def pad_right(samples: list[dict[str, Any]], pad_token_id: int = 0) -> dict[str, Tensor]:
    """Make a batch: numbers are stacked, and tensors (n, ...) padded to the longest of their name, labels with -100,
    scores as ``SCORES`` says, and others with 0."""
    fills = {"input_ids": pad_token_id, "labels": IGNORE_INDEX} | SCORES
    batch = {}
    for name, first in samples[0].items():
        values = [sample[name] for sample in samples]
        batch[name] = pad_sequence(values, True, fills.get(name, 0)) if first.ndim else torch.stack(values)
    return batch


@dataclass
class BatchOrder(Sampler[list[int]]):
    """Yield the row numbers of each batch of one rank; a filler ``-1 - row`` stands for the row without its labels."""

    num_samples: int
    batch_size: int  # of one rank
    shuffle: bool = False  # draw a new order for each epoch; else keep the dataset's own
    seed: int = 0
    drop_last: bool = False  # leave out the last, smaller batch (of all ranks together), unless it is the only one
    num_replicas: int = 1  # ranks that train on different data
    rank: int = 0  # among them
    draw: Callable[[int, int], npt.NDArray[np.int64]] | None = None  # an order of the dataset's own, of seed and epoch
    epoch: int = -1  # of the next pass; none has begun
    start: int = 0  # the batch that it begins with

    @property
    def rows_of_all_ranks(self) -> int:
        return self.batch_size * self.num_replicas

    def __len__(self) -> int:
        full, rest = divmod(self.num_samples, self.rows_of_all_ranks)
        return full + (rest > 0 and not (self.drop_last and full))

    def permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the order of all samples in an epoch, (samples,)."""
        if self.draw is not None:
            return self.draw(self.seed, epoch if self.shuffle else 0)
        if not self.shuffle:
            return np.arange(self.num_samples)
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.permutation(self.epoch)
        for batch in range(self.start, len(self)):
            rows = order[batch * self.rows_of_all_ranks : (batch + 1) * self.rows_of_all_ranks]
            share = -(-len(rows) // self.num_replicas)
            mine = rows[self.rank * share : (self.rank + 1) * share].tolist()
            yield mine + [-1 - int(rows[0])] * (share - len(mine))

    def decided_by(self, epoch: int) -> dict[str, Any]:
        """Return what decides which samples are in which batch of an epoch, on all ranks together."""
        checksum = zlib.crc32(self.permutation(epoch).tobytes())
        sizes = {"number of samples": self.num_samples, _ROWS: self.rows_of_all_ranks}
        return sizes | {"checksum of the order": checksum}


class BatchLoader:
    """Yield one rank's batches, epoch after epoch.

    Args:
        dataset: A map-style dataset whose samples are dicts with "labels", tensors or lists.
        pin_memory: Batches lie in pinned memory, from where a GPU fetches them beside its computation.
        position: Returns the epoch and the batch that a pass begins with, when it begins. None: one pass is one epoch.
        order: See :class:`BatchOrder`.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        position: Callable[[], tuple[int, int]] | None = None,
        **order: Any,
    ) -> None:
        self.dataset = dataset
        self.batch_sampler = BatchOrder(len(dataset), batch_size, **order)
        self._position = position
        self._loader = DataLoader(
            _Rows(dataset),
            batch_sampler=self.batch_sampler,
            collate_fn=collate_fn,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # Each pass draws a number, which must not come from the global generator.
        )

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        """Yield one epoch, or what is left of it."""
        # A generator does nothing before its first batch is asked for; Lightning knows the epoch only after ``iter``.
        order = self.batch_sampler
        order.epoch, order.start = (order.epoch + 1, 0) if self._position is None else self._position()
        yield from self._loader

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the trainer knows the position. Lightning warns of loaders that lack these two methods."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class _Rows(Dataset[Any]):
    """The samples of a dataset, and fillers, whose labels are all ignored."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        if index >= 0:
            return self.dataset[index]
        row = self.dataset[-1 - index]
        labels = row["labels"]
        ignored = torch.full_like(labels, IGNORE_INDEX) if isinstance(labels, Tensor) else [IGNORE_INDEX] * len(labels)
        return {**row, "labels": ignored}


class BatchDataModule(L.LightningDataModule):
    """A data module whose training resumes exactly, also within an epoch. Test and prediction use validation's data."""

    @checked_options("data.", batch_size=1, num_workers=0, seed=0)
    def __init__(self, batch_size: int, num_workers: int = 0, seed: int = 0) -> None:
        super().__init__()
        self.batch_size, self.num_workers, self.seed = batch_size, num_workers, seed
        self._order: BatchOrder | None = None  # of training
        self._resumed: dict[str, Any] | None = None  # the state of a checkpoint, until training starts

    def training_batches(self, dataset: Any, collate_fn: Collate | None = None, *, shuffle: bool = True) -> BatchLoader:
        """Return the loader of training batches. The last, smaller batch is dropped, unless it is the only one."""
        overfits = getattr(self.trainer, "overfit_batches", 0) > 0  # the same batches in every epoch
        loader = self.evaluation_batches(
            dataset,
            collate_fn,
            shuffle=shuffle and not overfits,
            seed=self.seed,
            drop_last=True,
            draw=getattr(dataset, "draw", None),
            position=None if self.trainer is None else self._position,
        )
        self._order = loader.batch_sampler
        return loader

    def evaluation_batches(self, dataset: Any, collate_fn: Collate | None = None, **options: Any) -> BatchLoader:
        """Return a loader of all samples in their order, or as ``options`` of :class:`BatchLoader` say."""
        if self.trainer is not None:
            options |= self.trainer.distributed_sampler_kwargs or {}  # num_replicas and rank
            options["pin_memory"] = self.trainer.strategy.root_device.type == "cuda"
        return BatchLoader(dataset, self.batch_size, collate_fn=collate_fn, num_workers=self.num_workers, **options)

    def test_dataloader(self) -> Any:
        rank_zero_info("The data have no test part: the validation part is used.")
        return self.val_dataloader()

    def predict_dataloader(self) -> Any:
        return self.val_dataloader()

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the batches of the epoch that runs."""
        if self.trainer is None or self._order is None:
            return {}
        epoch = self.trainer.current_epoch
        return {"epoch": epoch, "data": self._order.decided_by(epoch)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict

    def resume_epoch(self) -> None:
        """Convert the trainer's count of batches, if the checkpoint was made with other batches.

        ``FusedLMModule`` calls this when training starts: Lightning passes over an epoch whose count is beyond its end.
        ``UserError``: the checkpoint was made in the middle of this epoch, whose other batches this run would not give.
        """
        saved, self._resumed = self._resumed, None
        if self.trainer is None or self._order is None or not saved or saved.get("epoch") != self.trainer.current_epoch:
            return
        progress, epoch = self.trainer.fit_loop.epoch_loop.batch_progress, self.trainer.current_epoch
        batch, there, here = progress.current.ready, saved["data"], self._order.decided_by(epoch)
        differences = [name for name in here if here[name] != there[name]]
        seen = batch * there[_ROWS]
        if not differences or not 0 < seen <= there["number of samples"] - there[_ROWS]:  # The epoch is over.
            return
        if differences == [_ROWS] and seen % here[_ROWS] == 0:
            shift = seen // here[_ROWS] - batch
            for counts in (progress.current, progress.total):
                for name in vars(counts):  # ready, started, processed, completed
                    setattr(counts, name, getattr(counts, name) + shift)
            return
        listed = "; ".join(f"{name} {there[name]} there and {here[name]} here" for name in differences)
        raise UserError(
            f"the checkpoint was made after {batch} batches of epoch {epoch}, whose other batches this run would not "
            f"give: {listed}. Resume with the same data and data.seed, and with data.batch_size times devices so that "
            f"it divides the {seen} samples that were seen, or from a checkpoint of the end of an epoch"
        )

    def _position(self) -> tuple[int, int]:
        """Return the epoch and batch that the trainer is at; the first ones where it has ended."""
        assert self.trainer is not None
        if self.trainer.state.finished:
            return 0, 0
        self.resume_epoch()
        return self.trainer.current_epoch, self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
