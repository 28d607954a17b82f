"""CONTRIBUTING.md lists the mistakes that the library refuses, each with a test that exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_guard_has_a_test_and_there_are_about_forty():
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Guards")[2].partition("\n## ")[0]
    shown = re.findall(r"^- `(test_\w+)`$", section, re.MULTILINE)
    tests = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert not set(shown) - tests
    assert len(shown) == len(set(shown))
    assert 30 <= len(shown) <= 45, "a new guard replaces an old one"
