"""The README keeps its word: its commands compose, its code runs, its links and its tree exist."""

import re
import shlex
from pathlib import Path

import pytest
from composed import composed

from lit_fused.app.commands import MODES
from lit_fused.app.config import check_config

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines() if "train.py" in line]
TREE = next(text for language, text in BLOCKS if not language)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_choices_that_exist(command):
    words = shlex.split(command.removeprefix("python train.py"))
    overrides = [
        re.sub(r"=(\w+),.*", r"=\1", word) for word in words if word != "-m" and not word.startswith("ckpt_path")
    ]
    extra = [f"ckpt_path={__file__}"] if "ckpt_path" in command else []
    check_config(composed(*overrides, *extra), MODES)


def test_the_choices_of_a_sweep_exist_each():
    for values in re.findall(r"loss=(\w+(?:,\w+)+)", " ".join(COMMANDS)):
        assert all((ROOT / "conf" / "loss" / f"{value}.yaml").exists() for value in values.split(","))


def test_every_loss_file_has_its_row_in_the_table_of_losses():
    rows = set(re.findall(r"^\| `(\w+)`", README, re.MULTILINE))
    assert rows == {file.stem for file in (ROOT / "conf" / "loss").iterdir()}


def test_the_code_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for language, text in BLOCKS:
        if language == "python":
            exec(text, namespace)
    assert namespace["logits"].shape == (8, 32000)  # type: ignore[attr-defined]


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
