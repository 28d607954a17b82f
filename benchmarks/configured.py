"""Compose the configuration of a run from conf/, as train.py does with the same overrides."""

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

ROOT = Path(__file__).resolve().parents[1]


def composed(*words: str, with_hydra: bool = False) -> Any:
    """Return the configuration; ``with_hydra`` adds Hydra's own, which a whole run reads."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("train", list(words), return_hydra_config=with_hydra)
