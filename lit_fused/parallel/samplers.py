"""Tell of what Lightning does to a project's own data loaders, whose rows it divides among ranks."""

from typing import Any

from lightning.pytorch.utilities import CombinedLoader, rank_zero_warn
from torch.utils.data import DistributedSampler

_REPEATED = {  # where some rows count twice, and what to do instead
    "training": ("every epoch", "or lit_fused's data modules"),
    "validation": ("val/loss", "lit_fused's data modules, or a trainer of one device for the final validation"),
}


def _sampler_of(loader: Any) -> Any:
    batches = getattr(loader, "batch_sampler", None)  # That of a stream has a length by its class, and none if asked.
    return getattr(loader if batches is None else batches, "sampler", None)


def warn_of_repeated_rows(loaders: Any, stage: str) -> None:
    """Warn of data loaders whose sampler gives some rows to two ranks, so that every rank gets as many; ``stage`` is
    what they are for."""
    for loader in CombinedLoader(loaders).flattened:
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
