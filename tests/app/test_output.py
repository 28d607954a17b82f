"""Show that a run outlives the readers of its output, and that a terminal obeys nothing of a stranger's file."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_templates import make_tokenizer
from commands import SYNTHETIC, TINY_MODEL, command, environment, train
from data_modules import chat_data, ready
from sweep_runs import write_run

from lit_fused import UserError
from lit_fused.app.overrides import with_run
from lit_fused.app.reporting.page import write_report
from lit_fused.data import ChatEncoding, load_records
from lit_fused.data.interactions import read_interactions
from lit_fused.ops.user_error import printable

ESCAPE = "\x1b]52;c;cm0gLXJm\x07\x1b[2J\u202e"
JOB = [*SYNTHETIC, *TINY_MODEL, "trainer.max_steps=3", "~callbacks.sample_text", "~callbacks.export"]
PRINTS = """
import sys
from lit_fused.app.streams import keep_printing
keep_printing()
for number in range(3):
    print("é ━ 日本", "x" * 100_000, flush=True)
    print("é", file=sys.stderr)
open(sys.argv[1], "w").write("ended")
"""


def shell(line: str, folder: Path, **variables: str) -> str:
    """Run a line of bash that fails if any of its commands does; return what it printed."""
    arguments = ["bash", "-o", "pipefail", "-c", line]
    done = subprocess.run(arguments, cwd=folder, env=environment(folder) | variables, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr.decode()
    return (done.stdout + done.stderr).decode(errors="replace")


@pytest.mark.parametrize("where", ["| head -c 1", ">&-", "2>&-", "> /dev/full 2>&1", "2>&1 | head -c 1"])
def test_an_output_that_is_closed_or_full_does_not_end_the_program(where, tmp_path):
    (tmp_path / "prints.py").write_text(PRINTS)
    shell(f"{sys.executable} prints.py ended {where}", tmp_path)
    assert (tmp_path / "ended").exists()


def test_characters_that_an_output_lacks_are_written_as_escapes(tmp_path):
    (tmp_path / "prints.py").write_text(PRINTS)
    said = shell(f"{sys.executable} prints.py ended", tmp_path, PYTHONIOENCODING="ascii")
    assert said.startswith(r"\xe9 \u2501 \u65e5\u672c x")


@pytest.mark.slow
def test_a_run_goes_on_when_its_reader_has_left(tmp_path):
    words = " ".join(f"'{word}'" for word in command(*JOB, "hydra.run.dir=out"))
    shell(f"{words} | head -n 1", tmp_path)
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["steps"] == 3


def test_an_error_and_a_report_of_data_show_a_strangers_names_as_escapes(tmp_path):
    def written(record: Any) -> Path:
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(record | {"n": n}) + "\n" for n in range(9)))
        return path

    said = []
    for read in (
        lambda: load_records(written({ESCAPE: 1}), columns=["text"], cache_dir=tmp_path),
        lambda: read_interactions(written({ESCAPE: 1})),
        lambda: ChatEncoding().form([ESCAPE]),
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
    done = train(tmp_path, *TINY_MODEL, "data=text", "data.path=data.jsonl")
    assert done.status == 1
    assert r"has the columns \x1b]52;" in done.output
    assert "\x1b" not in done.output
