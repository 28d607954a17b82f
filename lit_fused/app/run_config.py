"""Find the configuration of the run that wrote a checkpoint, in the run's own folder, and read it without torch."""

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_fused.app.plain_yaml import check_length, plain_yaml
from lit_fused.app.trusted import check_trusted
from lit_fused.errors import UserError

_FOLDER = ".hydra"


def folder_of_run(checkpoint: str | Path) -> Path | None:
    """Return the folder of the run that wrote RUN/checkpoints/NAME or RUN/NAME; None if it has no configuration."""
    folder = Path(checkpoint).absolute().parent
    folders = [folder, folder.parent] if folder.name == "checkpoints" else [folder]
    return next((run for run in folders if (run / _FOLDER / "config.yaml").is_file()), None)


def read_config(run: Path, allowed: Collection[str] = ()) -> dict[str, Any]:
    """Return a run's configuration, not resolved; UserError if it could run code beside that of trusted classes."""
    content = saved_config(run)
    check_trusted(content, run, allowed)
    return content


def saved_config(run: Path) -> dict[str, Any]:
    """Return a run's configuration as it was saved, not checked and not resolved."""
    return _yaml(run / _FOLDER / "config.yaml")


def started_in(run: Path) -> str:
    """Return the folder that a run was started in, if it still exists; else the current one."""
    hydra = run / _FOLDER / "hydra.yaml"
    folder = node_at(_yaml(hydra), "hydra.runtime.cwd") if hydra.is_file() else None
    return folder if isinstance(folder, str) and os.path.isdir(folder) else os.getcwd()


def node_at(content: Any, path: str) -> Any:
    """Return what lies at a path of keys with dots; None if nothing does, and the whole for an empty path."""
    for key in filter(None, path.split(".")):
        content = content.get(key) if isinstance(content, dict) else None
    return content


def _yaml(file: Path) -> dict[str, Any]:
    try:
        text = plain_yaml(_settled(file))
        content: Any = OmegaConf.to_container(OmegaConf.create(text))
        check_length(content, len(text))
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(
            f"{file} cannot be read ({str(error).strip().splitlines()[0]}); restore it, or move the checkpoint to "
            "another folder and give its model and data on the command line"
        ) from error
    if not isinstance(content, dict) or not content:
        found = f"has a {type(content).__name__} in place of a mapping" if content else "is empty"
        raise UserError(f"{file} is no configuration of a run: it {found}; restore it, or move the checkpoint away")
    return content


def _settled(file: Path) -> str:
    """Return a file's text, also where each of several ranks that resume in the run's own folder writes it anew."""
    text, ranks = file.read_text(encoding="utf-8"), os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1"))
    while ranks != "1":
        time.sleep(0.1)
        before, text = text, file.read_text(encoding="utf-8")
        if before == text:
            break
    return text
