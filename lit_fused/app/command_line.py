"""Tell how this run was started, from what Hydra has composed: also in jobs that a launcher starts elsewhere."""

import os
import shutil
import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig


def command_line() -> list[str]:
    """Return the command without overrides, for example ``["lit-fused", "--config-dir", "my_conf"]``."""
    hydra = HydraConfig.get()
    started_in = hydra.runtime.cwd
    sources = {source.provider: source for source in hydra.runtime.config_sources}
    main = sources["main"]
    if main.schema == "pkg":
        words = [_program("lit-fused", started_in)]
    else:  # conf/ lies beside the script
        words = [_program("python", started_in), os.path.relpath(Path(main.path).parent / "train.py", started_in)]
    if "command-line" in sources:
        words += ["--config-dir", os.path.relpath(sources["command-line"].path, started_in)]
    if hydra.job.config_name != "train":
        words += ["--config-name", str(hydra.job.config_name)]
    return words


def _program(name: str, started_in: str) -> str:
    # An environment that is not activated needs the path; make train activates none.
    path = Path(sys.executable).parent / name
    if Path(shutil.which(name) or ".") == path:
        return name
    return str(path.relative_to(started_in) if path.is_relative_to(started_in) else path)
