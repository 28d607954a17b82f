"""Inputs that cannot be read, or whose reading would never end: refused by name, and never skipped without a word."""

import json
import os
import signal
import socket
import tempfile
from pathlib import Path

import pytest
from data_modules import hub_data, text_data, tokens_data

from lit_fused.data import FileSource
from lit_fused.data.source import DocumentError
from lit_fused.errors import UserError


@pytest.fixture(autouse=True)
def _no_hang():
    """Whatever waits for a pipe for ten seconds waits for ever."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(10)
    yield
    signal.alarm(0)


def prepare(make, path, cache, **options):
    make(path=path, cache_dir=cache, **{"block_size": 8} | options).prepare()


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_what_is_no_regular_file_is_refused_by_name(tmp_path, kind):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("a text\n" * 100)
    for name in ("b.txt", "b.bin", "b.jsonl"):
        if kind == "pipe":
            os.mkfifo(corpus / name)
        elif kind == "socket":
            socket.socket(socket.AF_UNIX).bind(str(corpus / name))
        else:
            (corpus / name).symlink_to("/dev/zero")
    (corpus / "b.jsonl").rename(tmp_path / "b.jsonl")
    for make, path, options in (
        (text_data, corpus, {}),
        (text_data, corpus / "b.txt", {}),
        (tokens_data, corpus / "b.bin", {"vocab_size": 50}),
        (hub_data, tmp_path / "b.jsonl", {"format": "text"}),
    ):
        with pytest.raises(UserError, match=r"/b\.\w+ is no regular file but a folder, pipe, socket or device"):
            prepare(make, path, tmp_path / "cache", **options)


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs users")
@pytest.mark.parametrize("closed", ["in", "in/below"])
def test_a_folder_without_permission_is_refused_by_name_and_not_skipped(closed):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in" / "below").mkdir(parents=True)
        (folder / "in" / "a.txt").write_text("a")
        (folder / "in" / "below" / "b.txt").write_text("b")
        (folder / closed).chmod(0)
        folder.chmod(0o755)
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(65534)  # nobody: root may do anything
            with pytest.raises(UserError, match=f"the folder {folder / closed} cannot be read: Permission denied"):
                FileSource(folder / "in").pieces()
        finally:
            os.seteuid(user)
            (folder / closed).chmod(0o755)


@pytest.mark.parametrize("line", ['{"text": %s}', '{"text": "a", "n": -%s}', "%s"])
def test_an_integer_of_more_digits_than_python_reads_is_a_bad_line(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "good"}) + "\n" + line % ("9" * 5000) + "\n")
    source = FileSource(tmp_path / "a.jsonl")
    good, bad = (document for piece in source.pieces() for document in source.read(piece))
    assert good.content == "good"
    assert isinstance(bad.content, DocumentError)
    assert str(bad.content).startswith("expected one JSON object, but the line cannot be parsed: Exceeds the limit")
    assert "sys.set_int" not in str(bad.content)
    assert bad.where() == f"{tmp_path}/a.jsonl:2"
