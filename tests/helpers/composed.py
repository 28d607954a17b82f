"""The configuration that a command line gives, without running it."""

from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict, read_write

CONF = Path(__file__).parents[2] / "conf"


def composed(*overrides: str) -> DictConfig:
    """The configuration as a run gets it: without Hydra's own node, but with its resolvers at work."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", list(overrides), return_hydra_config=True)
    with read_write(cfg), open_dict(cfg):
        cfg.hydra.runtime.output_dir = "the/run"
        HydraConfig.instance().set_config(cfg)
        own = cfg.copy()
        del own["hydra"]
    return own
