"""The configuration that a command line gives, without running it."""

import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hydra import compose, initialize_config_dir
from hydra._internal.config_repository import ConfigRepository
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict, read_write

import lit_fused.app.defaults  # noqa: F401 (registers the resolver that conf/ uses)

CONF = Path(__file__).parents[2] / "conf"
_read: dict[str, Any] = {}
_read_file = ConfigRepository.load_config


def _read_once(repository: ConfigRepository, config_path: str) -> Any:
    """Reading takes longer than composing: each file is read once, and copied for each composition."""
    if config_path not in _read:
        _read[config_path] = _read_file(repository, config_path)
    return copy.deepcopy(_read[config_path])


def composed(*overrides: str) -> DictConfig:
    """The configuration as a run gets it: without Hydra's own node, but with its resolvers at work."""
    with (
        initialize_config_dir(str(CONF), version_base="1.3"),
        patch.object(ConfigRepository, "load_config", _read_once),
    ):
        cfg = compose("train", list(overrides), return_hydra_config=True)
    with read_write(cfg), open_dict(cfg):
        cfg.hydra.runtime.output_dir = "the/run"
        HydraConfig.instance().set_config(cfg)
        own = cfg.copy()
        del own["hydra"]
    return own
