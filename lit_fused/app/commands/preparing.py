"""``mode=prepare``: the data alone."""

from hydra.utils import instantiate
from omegaconf import DictConfig

from lit_fused.data import TokenDataModule
from lit_fused.errors import UserError
from lit_fused.ops.user_error import printable


def prepare(cfg: DictConfig) -> None:
    """Tokenize the data and write them to the disk, unless they are prepared, and print a report of them."""
    data = instantiate(cfg.data)
    if not isinstance(data, TokenDataModule):
        raise UserError(f"mode=prepare needs data that become tokens, and {type(data).__name__} is not of that kind")
    print(printable(data.prepared.report))
