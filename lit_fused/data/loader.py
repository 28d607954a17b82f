"""Load batches in an order that (seed, epoch) alone decides, so that training can resume in the middle of an epoch.

Nothing about the order is state. Epoch e is a permutation of the samples drawn from (seed, e); batch m of all ranks
together is its rows ``[m * G, (m + 1) * G)``, where G is the batch size times the number of ranks that train on
different data. Lightning saves which epoch and which batch comes next, and that suffices on every rank, however far
worker processes have read ahead. (Lightning would restore a loader's own state too, but not where the number of epochs
sets the length of
the run: there it makes the loader before it reads the checkpoint.) With another G the count of batches is converted, if
it stays whole.

Every rank has the same number of batches, of the same number of rows. Where the samples do not suffice, a rank's batch
is filled up with rows whose labels are all ignored, so that sums and counts are those of each sample once.
"""

import zlib
from collections.abc import Callable, Iterator, Sized
from typing import Any

import lightning as L
import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from lit_fused.data.option_checks import check_int
from lit_fused.errors import UserError
from lit_fused.ops.label_checks import IGNORE_INDEX

_ROWS = "data.batch_size times devices"


class BatchLoader:
    """Yield one rank's batches, epoch after epoch.

    Args:
        dataset: A map-style dataset whose samples are dicts with "labels", tensors or lists.
        batch_size: Samples per batch, of one rank.
        shuffle: Draw a new order for each epoch; else keep the dataset's own.
        seed: The orders depend on it and on the epoch.
        drop_last: Leave out the last, smaller batch (of all ranks together), unless it is the only one.
        collate_fn: Makes a batch of a list of samples; by default torch's own.
        num_workers: Worker processes.
        num_replicas: The number of ranks that train on different data.
        rank: The number of this rank among them.
        position: Returns, when the first batch of a pass is asked for, the epoch and the number of that batch in it; by
            default one pass is one epoch.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
        position: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.batch_sampler = _Batches(dataset, batch_size, shuffle, seed, drop_last, num_replicas, rank)
        self._position = position
        self._loader = DataLoader(
            _Rows(dataset),
            batch_sampler=self.batch_sampler,
            collate_fn=collate_fn,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            generator=torch.Generator(),  # each pass draws a number, which must not come from the global generator
        )

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        """Yield one epoch, or what is left of it.

        As a generator, it draws and reads nothing before the first batch is asked for: Lightning calls ``iter`` before
        it knows which epoch it is.
        """
        order = self.batch_sampler
        order.epoch, order.start = (order.epoch + 1, 0) if self._position is None else self._position()
        yield from self._loader

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the trainer knows the position. Lightning warns of loaders that lack this method."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""

    @property
    def _iterator(self) -> Any:
        """Return the iterator in which Lightning looks for worker processes, to end them with the run."""
        return self._loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._loader._iterator = iterator

    def identity(self, epoch: int) -> dict[str, int]:
        """Return what decides which samples are in which batch of an epoch, on all ranks together."""
        order = self.batch_sampler
        return {
            "number of samples": order.num_samples,
            _ROWS: order.rows_of_all_ranks,
            "checksum of the order": order.checksum(epoch),
        }


class BatchDataModule(L.LightningDataModule):
    """A data module whose training resumes exactly, also in the middle of an epoch.

    Its batches are those of :class:`BatchLoader`, and a checkpoint says what its epoch's batches were made of. Test and
    prediction use the validation split.

    Args:
        batch_size: Samples per batch of one rank.
        num_workers: Worker processes of each data loader.
        seed: The order of training batches depends on it and on the epoch.
    """

    def __init__(self, batch_size: int, num_workers: int = 0, seed: int = 0) -> None:
        super().__init__()
        check_int("data.batch_size", batch_size, 1)
        check_int("data.num_workers", num_workers, 0)
        check_int("data.seed", seed, 0)
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        self._training: tuple[BatchLoader, str] | None = None  # the loader, and what its samples depend on
        self._resumed: dict[str, Any] | None = {}  # the checkpoint's state; None once resume_epoch has used it

    def training_batches(
        self, dataset: Any, identity: str, *, shuffle: bool = True, collate_fn: Callable[[list[Any]], Any] | None = None
    ) -> BatchLoader:
        """Return the loader of training batches. The last, smaller batch is dropped, unless it is the only one.

        Args:
            dataset: The training samples.
            identity: Tells this dataset from others; stored in checkpoints.
            shuffle: Draw a new order for each epoch.
            collate_fn: Makes a batch of a list of samples.
        """
        overfits = getattr(self.trainer, "overfit_batches", 0) > 0  # the same batches in every epoch
        num_replicas, rank = _replicas(self.trainer)
        loader = BatchLoader(
            dataset,
            self.batch_size,
            shuffle=shuffle and not overfits,
            seed=self.seed,
            drop_last=True,
            collate_fn=collate_fn,
            num_workers=self.num_workers,
            position=None if self.trainer is None else self._position,
            num_replicas=num_replicas,
            rank=rank,
        )
        self._training = (loader, identity)
        return loader

    def evaluation_batches(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None = None) -> BatchLoader:
        """Return a loader of all samples in their order."""
        num_replicas, rank = _replicas(self.trainer)
        return BatchLoader(
            dataset,
            self.batch_size,
            collate_fn=collate_fn,
            num_workers=self.num_workers,
            num_replicas=num_replicas,
            rank=rank,
        )

    def test_dataloader(self) -> BatchLoader:
        return self.val_dataloader()

    def predict_dataloader(self) -> BatchLoader:
        return self.val_dataloader()

    def state_dict(self) -> dict[str, Any]:
        """Return what decides the batches of the epoch that runs."""
        if self.trainer is None or self._training is None:
            return {}
        loader, identity = self._training
        epoch = self.trainer.current_epoch
        return {"epoch": epoch, "data": {"prepared data": identity} | loader.identity(epoch)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict

    def resume_epoch(self) -> None:
        """Convert the trainer's count of batches, if the checkpoint was made with other batches.

        ``FusedLMModule`` calls this when training starts: Lightning passes over an epoch whose count is beyond its end.

        Raises:
            UserError: The checkpoint was made in the middle of this epoch, and the epoch's other batches would not
                come.
        """
        assert self.trainer is not None
        if self._training is None:
            return
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        epoch, batch = self.trainer.current_epoch, progress.current.ready
        saved, self._resumed = self._resumed, None
        if saved is None:
            return
        loader, identity = self._training
        here = {"prepared data": identity} | loader.identity(epoch)
        there = saved["data"] if saved.get("epoch") == epoch else None
        length = len(loader) if there is None else max(1, there["number of samples"] // there[_ROWS])
        if not 0 < batch < length:
            return
        if there is None:
            rank_zero_warn(
                f"the checkpoint was made after {batch} batches of epoch {epoch}, but does not say of which data: it "
                "is of an earlier version, or of another kind of data; training goes on with this data's next batches"
            )
            return
        differences = {name: value for name, value in here.items() if value != there.get(name)}
        seen = batch * there[_ROWS]
        if differences.keys() == {_ROWS} and seen % here[_ROWS] == 0:
            shift = seen // here[_ROWS] - batch
            for counts in (progress.current, progress.total):
                for name in vars(counts):  # ready, started, processed, completed
                    setattr(counts, name, getattr(counts, name) + shift)
        elif differences:
            listed = "; ".join(
                f"{name} {there.get(name)} there and {value} here" for name, value in differences.items()
            )
            raise UserError(
                f"the checkpoint was made after {batch} batches of epoch {epoch}, and the other batches of that epoch "
                f"would not come: {listed}. Resume with the same data and data.seed, and with data.batch_size times "
                f"devices so that it divides the {seen} samples that were seen, or from a checkpoint that was made "
                "at the end of an epoch"
            )

    def _position(self) -> tuple[int, int]:
        """Return the epoch and batch that the trainer is at; the first ones where it has ended."""
        assert self.trainer is not None
        if self.trainer.state.finished:
            return 0, 0
        self.resume_epoch()
        return self.trainer.current_epoch, self.trainer.fit_loop.epoch_loop.batch_progress.current.ready


def _replicas(trainer: L.Trainer | None) -> tuple[int, int]:
    """Return the number of processes that train on different data, and the number of this one among them.

    Without a trainer, and where ``use_distributed_sampler=False`` gives all ranks the same batches, there is one alone.
    """
    if trainer is None or not trainer._accelerator_connector.use_distributed_sampler:
        return 1, 0
    found = trainer.distributed_sampler_kwargs or {}
    return found.get("num_replicas", 1), found.get("rank", 0)


class _Batches(Sampler[list[int]]):
    """Yield the row numbers of each batch of one rank; a filler ``-1 - row`` stands for the row without its labels."""

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        num_replicas: int,
        rank: int,
    ) -> None:
        self.num_samples = len(dataset)
        self.rows_of_all_ranks = batch_size * num_replicas
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last and self.num_samples >= self.rows_of_all_ranks
        self.num_replicas = num_replicas
        self.rank = rank
        self.epoch = -1  # no epoch has begun
        self.start = 0  # the batch that a pass begins with
        self._checksum = (-1, 0)  # the epoch, and the checksum of its order

    def __len__(self) -> int:
        full, rest = divmod(self.num_samples, self.rows_of_all_ranks)
        return full + (rest > 0 and not self.drop_last)

    def permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the order of all samples in an epoch, (samples,)."""
        if not self.shuffle:
            return np.arange(self.num_samples)
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)

    def checksum(self, epoch: int) -> int:
        """Return the CRC32 of the epoch's permutation; it changes if the seed or NumPy's generator does."""
        if self._checksum[0] != epoch:
            self._checksum = (epoch, zlib.crc32(self.permutation(epoch).tobytes()))
        return self._checksum[1]

    def __iter__(self) -> Iterator[list[int]]:
        order = self.permutation(self.epoch)
        for batch in range(self.start, len(self)):
            rows = order[batch * self.rows_of_all_ranks : (batch + 1) * self.rows_of_all_ranks]
            share = -(-len(rows) // self.num_replicas)
            mine = rows[self.rank * share : (self.rank + 1) * share].tolist()
            yield mine + [-1 - int(rows[0])] * (share - len(mine))


class _Rows(Dataset[Any]):
    """The samples of a dataset, and fillers, whose labels are all ignored."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        if index >= 0:
            return self.dataset[index]
        row = dict(self.dataset[-1 - index])
        labels = row["labels"]
        ignored = torch.full_like(labels, IGNORE_INDEX) if isinstance(labels, Tensor) else [IGNORE_INDEX] * len(labels)
        return row | {"labels": ignored}
