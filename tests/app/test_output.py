"""Show that a terminal obeys nothing of a stranger's file."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import make_tokenizer
from commands import TINY_MODEL, train
from data_modules import chat_data, ready
from sweep_runs import write_run

from lit_fused import UserError
from lit_fused.app.overrides import with_run
from lit_fused.app.reporting.page import write_report
from lit_fused.data import ChatEncoding, load_records
from lit_fused.data.interactions import read_interactions
from lit_fused.ops.user_error import printable

ESCAPE = "\x1b]52;c;cm0gLXJm\x07\x1b[2J\u202e"


def test_an_error_and_a_report_of_data_show_a_strangers_names_as_escapes(tmp_path):
    def written(record: Any) -> Path:
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(record | {"n": n}) + "\n" for n in range(9)))
        return path

    said = []
    for read in (
        lambda: load_records(written({ESCAPE: 1}), columns=["text"], cache_dir=tmp_path),
        lambda: read_interactions(written({ESCAPE: 1})),
        lambda: ChatEncoding().encoder(make_tokenizer("{{ 1 }}"), 9)([{ESCAPE: 1}]),
        lambda: ChatEncoding().encoder(make_tokenizer("{{ 1 }}"), 9)([{"messages": [{"role": ESCAPE, "content": 1}]}]),
    ):
        with pytest.raises(UserError) as refused:
            read()
        said.append(str(refused.value))
    make_tokenizer("{{ raise_exception(" + json.dumps(ESCAPE) + ") }}").save_pretrained(tmp_path / "tokenizer")
    chats = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(UserError) as refused:
        ready(chat_data(path=written(chats), tokenizer=tmp_path / "tokenizer", cache_dir=tmp_path))
    said.append(str(refused.value))
    for text in said:
        assert r"\x1b]52;c;cm0gLXJm\x07\x1b[2J\u202e" in text
        assert printable(text) == text


def test_a_strangers_runs_are_reported_and_resumed_without_their_escapes(tmp_path):
    write_run(tmp_path, 0, [f"seed=1{ESCAPE}"], None)
    (tmp_path / "0" / "error.txt").write_text(ESCAPE)
    report = write_report(tmp_path)
    assert printable(report) == report
    (tmp_path / "0" / "last.ckpt").touch()
    with pytest.raises(UserError, match="type it again"):
        with_run([f"ckpt_path={tmp_path}/0/last.ckpt"])


def test_the_command_prints_no_escapes_of_a_strangers_file(tmp_path):
    (tmp_path / "data.jsonl").write_text(json.dumps({ESCAPE: "a"}) + "\n")
    done = train(tmp_path, *TINY_MODEL, "data=text", "data.path=data.jsonl", status=1)
    assert r"has the columns \x1b]52;" in done.output
    assert "\x1b" not in done.output
