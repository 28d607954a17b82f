"""Look after what Lightning does to a project's own data loaders, whose rows it divides among ranks."""

from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lit_fused.errors import UserError

_PLAIN = (RandomSampler, SequentialSampler, type(None))  # in place of which Lightning has one that does the same
_REPEATED = {  # where some rows count twice, and what to do instead
    "training": ("every epoch", "or lit_fused's data modules"),
    "validation": ("val/loss", "lit_fused's data modules, or a trainer of one device for the final validation"),
}


def keep_order(trainer: L.Trainer) -> None:
    """Let the trainer divide loaders among ranks without shuffling those that do not shuffle.

    Lightning shuffles whatever it divides for training: loaders that read row after row, also where there is nothing to
    be divided, and those with a sampler of an order of its own.
    """
    connector: Any = trainer._data_connector
    prepare: Any = type(connector)._prepare_dataloader.__get__(connector)

    def prepare_in_order(loader: Any, shuffle: bool, mode: RunningStage) -> Any:
        return divided_in_order(loader, shuffle, mode)

    def divided_in_order(loader: Any, shuffle: bool, mode: RunningStage) -> Any:
        if not isinstance(loader, DataLoader):
            return loader
        shuffles = isinstance(_sampler_of(loader), RandomSampler)
        replicas: Any = (trainer.distributed_sampler_kwargs or {}).get("num_replicas")
        if mode != RunningStage.PREDICTING and connector._requires_distributed_sampler(loader):
            if replicas == 1 and not shuffles:
                return loader
            _check_batch_sampler(loader, replicas)
        return prepare(loader, shuffle and shuffles, mode)

    connector._prepare_dataloader = prepare_in_order


def _check_batch_sampler(loader: DataLoader[Any], replicas: int) -> None:
    """Refuse what Lightning would make batches of another size, or of other rows, of: it divides the loader's own
    sampler, and a loader with a batch sampler has one that reads row after row."""
    batches = loader.batch_sampler if loader.batch_size is None else None  # A loader's own has its batch size.
    inner = getattr(batches, "sampler", None)
    if type(batches) is BatchSampler or not isinstance(inner, _PLAIN):
        raise UserError(
            f"Lightning cannot divide the batches of {type(batches).__name__}({type(inner).__name__}) among {replicas} "
            "ranks: it would replace the sampler and lose the batch size. Give the DataLoader sampler= and batch_size= "
            "in place of batch_sampler=; or the trainer use_distributed_sampler=False, and the loader a sampler that "
            "knows the data-parallel rank"
        )


def _sampler_of(loader: Any) -> Any:
    batches = getattr(loader, "batch_sampler", None)  # That of a stream has a length by its class, and none if asked.
    return getattr(loader if batches is None else batches, "sampler", None)


def warn_of_repeated_rows(loaders: Any, stage: str) -> None:
    """Warn of data loaders whose sampler gives some rows to two ranks, so that every rank gets as many; ``stage`` is
    what they are for."""
    for loader in tree_leaves(loaders):
        sampler = _sampler_of(loader)
        if not isinstance(sampler, DistributedSampler):
            continue
        rows: Any = sampler.dataset  # Map-style datasets have a length, which their class does not promise.
        repeated = sampler.total_size - len(rows)
        if repeated > 0:
            where, instead = _REPEATED[stage]
            rank_zero_warn(
                f"{repeated} of {len(rows)} {stage} rows count twice in {where}, so that each of "
                f"{sampler.num_replicas} ranks gets as many; choose a number of rows that they can share equally, "
                f"{instead}"
            )
