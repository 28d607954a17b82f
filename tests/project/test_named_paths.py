"""Every file and every dotted name of the package that a page names exists."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/architecture.md")
FILE = re.compile(r"(?<![\w~/.-])(?:lit_fused|conf|tests|tools|docs|examples)/[\w./]*[\w/]")
NAME = re.compile(r"(?<![\w/])lit_fused(?:\.[A-Za-z_]\w*)+")
MADE_UP = re.compile(r"\bNAME|mine\.yaml")


def exists(name: str) -> bool:
    """Tell whether a dotted name is a module of the package, or an attribute of one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        if path.is_dir() or path.with_suffix(".py").is_file():
            thing = importlib.import_module(".".join(parts[:length])) if length < len(parts) else None
            for part in parts[length:]:
                thing = getattr(thing, part, None)
                if thing is None:
                    return False
            return True
    return False


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    files = {file for file in FILE.findall(text) if not MADE_UP.search(file)}
    names = set(NAME.findall(text))
    assert files | names
    missing = [file for file in files if not (ROOT / file).exists()]
    assert not missing + [name for name in names if not exists(name)]


def test_a_name_that_is_gone_is_found():
    assert exists("lit_fused.data.TokenDataModule")
    assert not exists("lit_fused.data.TextDataModule")
    assert not exists("lit_fused.nothing")
