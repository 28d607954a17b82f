"""Build lit_fused/ops, which needs torch alone, as a distribution of its own: lit-fused-ops.

    python tools/build_ops_wheel.py  # writes dist/lit_fused_ops-*.whl

The folder imports nothing of the package around it, so it is packed as it is, under another name.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
[VERSION] = re.findall('^__version__ = "(.+)"$', (ROOT / "lit_fused" / "__init__.py").read_text(), re.MULTILINE)
[TORCH] = [requirement for requirement in PROJECT["dependencies"] if requirement.startswith("torch>")]
CARD = ROOT / "tools" / "ops_card.md"
PYPROJECT = f"""\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "lit-fused-ops"
version = "{VERSION}"
description = "Cross entropy, token scores and distillation of a linear output layer without its logits."
readme = "README.md"
requires-python = "{PROJECT["requires-python"]}"
license = "{PROJECT["license"]}"
license-files = ["LICENSE"]
dependencies = ["{TORCH}"]
"""


def card(load: str) -> str:
    """Return the README of the operators alone, whose example begins with the lines ``load``."""
    return CARD.read_text().replace("LOAD\n", load)


def copy_ops(folder: Path) -> None:
    """Copy lit_fused/ops to ``folder``, which does not exist yet."""
    shutil.copytree(ROOT / "lit_fused" / "ops", folder, ignore=shutil.ignore_patterns("__pycache__"))


def build(folder: Path, *options: str) -> Path:
    """Write the wheel to a folder with ``pip wheel`` and these options of it, and return the file."""
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary, "source")
        copy_ops(source / "lit_fused_ops")
        shutil.copy(ROOT / "LICENSE", source)
        (source / "README.md").write_text(card("import lit_fused_ops as ops\n"))
        (source / "pyproject.toml").write_text(PYPROJECT)
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *options]
        subprocess.run([*pip, "--wheel-dir", temporary, source], check=True)
        [wheel] = Path(temporary).glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, folder))


if __name__ == "__main__":
    print(build(ROOT / "dist"))
