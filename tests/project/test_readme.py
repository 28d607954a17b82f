"""The README is short and keeps its word: its commands compose, its code runs, its links exist.

What it leaves to pages is held to the same: the table of losses, the code of a Lightning project, the tree of files.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from composed import composed

from lit_fused.app.commands import MODES
from lit_fused.app.config import check_config

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


LINES = "\n".join(blocks("README.md", "bash")).splitlines()
COMMANDS = [line.partition(" # ")[0].strip() for line in LINES if "train.py" in line]
[TREE] = [text for text in blocks("docs/architecture.md", "") if text.startswith("train.py")]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_choices_that_exist(command):
    words = shlex.split(command.removeprefix("python train.py"))
    overrides = [
        re.sub(r"=(\w+),.*", r"=\1", word) for word in words if word != "-m" and not word.startswith("ckpt_path")
    ]
    extra = [f"ckpt_path={__file__}"] if "ckpt_path" in command else []
    check_config(composed(*overrides, *extra), MODES)


def test_every_loss_file_has_its_row_in_the_table_of_losses():
    [table] = re.findall(r"## All losses\n(.*?)\n## ", (ROOT / "docs" / "losses.md").read_text(), re.DOTALL)
    rows = set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))
    assert rows == {file.stem for file in (ROOT / "conf" / "loss").iterdir()}


@pytest.mark.parametrize(
    ("page", "name", "shape"), [("README.md", "loss", ()), ("docs/lightning_module.md", "logits", (8, 32000))]
)
def test_the_code_runs_as_it_stands(page, name, shape, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    for text in blocks(page, "python"):
        exec(text, namespace)
    assert namespace[name].shape == shape
    assert namespace[name].isfinite().all()


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "examples" / "README.md", *(ROOT / "docs").rglob("*.md")])
def test_every_link_into_the_project_leads_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_tree_shows_every_room_of_the_package_and_nothing_that_is_gone():
    shown = {line.split()[0].rstrip("/") for line in TREE.splitlines() if line.startswith("  ")}
    package = {p.name for p in (ROOT / "lit_fused").iterdir() if not p.name.startswith("__")}
    assert {name.split("/")[0] for name in shown} == package
    assert all((ROOT / "lit_fused" / name).exists() for name in shown)
    groups = {p.name for p in (ROOT / "conf").iterdir() if p.is_dir() and not p.name.startswith("__")}
    listed = re.search(r"one folder per choice: (.*)", TREE)
    assert listed
    assert set(listed[1].split(", ")) == groups
