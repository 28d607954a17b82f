"""``mode=prepare``: the data's way to the disk alone, before the run that needs it (and perhaps a GPU)."""

from hydra.utils import instantiate
from omegaconf import DictConfig

from lit_fused.data import TokenDataModule
from lit_fused.errors import UserError


def prepare(cfg: DictConfig) -> None:
    """Prepare the data, unless they are, and print what there is."""
    data = instantiate(cfg.data)
    if not isinstance(data, TokenDataModule):
        raise UserError(
            f"mode=prepare prepares data that become tokens on the disk, and {type(data).__name__} is not of that "
            "kind; choose other data, such as data=text data.path=..., or mode=fit"
        )
    try:
        print(data.prepare(show=True))
    except KeyboardInterrupt:
        raise SystemExit("interrupted: what is finished is kept, and the same command goes on from there") from None
