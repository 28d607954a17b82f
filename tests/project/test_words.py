"""The part of the rules of language that a program can check: how docstrings and comments begin.

A docstring begins with a verb in the imperative or with what is returned; a comment is no relative clause, and one with
a line of its own is a sentence.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PACKAGE = PROJECT / "lit_fused"

NO_DOCSTRING = {"Of", "What", "Whether", "Where", "Which", "Whose", "Who", "Why", "Within"}
NO_COMMENT = {"which", "whose", "whom"}


def beginnings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring and comment whose first word is not allowed."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if re.split(r"\W", text, maxsplit=1)[0] in NO_DOCSTRING:
                yield getattr(node, "lineno", 1), text.splitlines()[0]
    before = tokenize.TokenInfo(0, "", (0, 0), (0, 0), "")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            word = re.split(r"\W", token.string.lstrip("# "), maxsplit=1)[0]
            begins = not token.line[: token.start[1]].strip() and before.type != tokenize.COMMENT
            if word in NO_COMMENT or (begins and word.capitalize() in NO_DOCSTRING):
                yield token.start[0], token.string
        before = token if token.type != tokenize.NL else before


@pytest.mark.parametrize("room", sorted({path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")}))
def test_docstrings_and_comments_begin_as_the_style_asks(room: str) -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {text}"
        for path in ([PACKAGE / room] if room.endswith(".py") else sorted((PACKAGE / room).rglob("*.py")))
        for line, text in beginnings(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", ["tests", "tools", "examples", "benchmarks"])
def test_what_stands_beside_the_package_begins_so_too(folder: str) -> None:
    files = sorted((PROJECT / folder).rglob("*.py"))
    found = [f"{path}:{line}: {text}" for path in files for line, text in beginnings(path.read_text())]
    assert not found, "\n".join(found)


def test_a_riddle_is_found_and_a_sentence_is_not():
    riddles = '"""What it is."""\ndef f():\n    """Of a file."""\n    x = 1  # which is one\n    # Of two.\n'
    assert [line for line, _ in beginnings(riddles)] == [1, 2, 4, 5]
    assert not list(beginnings('"""Return what it is."""\nx = 1  # the value which is one\n# It is one,\n# of two.\n'))
