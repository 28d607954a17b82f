"""``mode=prepare``: the data alone."""

from hydra.utils import instantiate
from omegaconf import DictConfig

from lit_fused.ops.user_error import printable


def prepare(cfg: DictConfig) -> None:
    """Tokenize the data and write them to the disk, unless they are prepared, and print a report of them."""
    print(printable(instantiate(cfg.data).prepared.report))
