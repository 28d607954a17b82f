"""Each test of this room has caches of its own; those that ask for them have small documents."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # the data module would otherwise set and leave it


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder of 20 small documents, each unlike the others."""
    folder = tmp_path / "corpus"
    (folder / "inner").mkdir(parents=True)
    for i in range(20):
        lines = [f"line {j} of document {i}: {i * j} naïve 日本\n" for j in range(10 + i)]
        (folder / ("inner" if i % 2 else "") / f"{i:02}.txt").write_text("".join(lines), encoding="utf-8")
    return folder
