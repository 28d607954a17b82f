"""``mode=prepare``: the data alone; and the preparation of large data before other modes load torch."""

from importlib import import_module

from hydra.utils import instantiate
from omegaconf import DictConfig

from lit_fused.errors import UserError, needing

_COMPOSED, _LIGHT = "lit_fused.data.compose_data", "lit_fused.data.tokens_to_prepare"


def prepare(cfg: DictConfig) -> None:
    """Tokenize the data and write them to the disk, unless they are prepared, and print a report of them."""
    if cfg.data.get("_target_") == _COMPOSED:
        make = instantiate(cfg.data, _target_=_LIGHT).prepare_and_verify
    else:
        from lit_fused.data import TokenDataModule

        data = instantiate(cfg.data)
        if not isinstance(data, TokenDataModule):
            raise UserError(
                f"mode=prepare prepares data that become tokens on the disk, and {type(data).__name__} is not of that "
                "kind; choose other data, such as data=text data.path=..., or mode=fit"
            )
        make = data.prepare
    try:
        print(make(show=True))
    except KeyboardInterrupt:
        raise SystemExit("interrupted: what is finished is kept, and the same command goes on from there") from None


def prepare_first(cfg: DictConfig) -> None:
    """Prepare data of more than 64 MiB before torch takes the memory for it; UserError if a reader is not installed."""
    if cfg.data.get("_target_") != _COMPOSED:
        return
    with needing(f"mode={cfg.mode}", "train"):
        import_module("lit_fused.data.to_prepare")
    if cfg.mode in ("fit", "validate", "test") and cfg.data.get("path"):
        data = instantiate(cfg.data, _target_=_LIGHT)
        if data.is_large:
            data.prepare(show=True)
