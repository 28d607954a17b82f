"""load_records: every kind of file, folder and name gives its records in order."""

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from datasets import config
from datasets.arrow_writer import ArrowWriter
from fake_hub import fake_hub

from lit_fused.data import RolloutDataModule, records
from lit_fused.data.records import load_records
from lit_fused.errors import UserError

ROWS = [{"text": f"document {i}: naïve 日本\n\n", "number": i} for i in range(12)]
TEXTS = [row["text"] for row in ROWS]


def written(kind: str, path: Path) -> Path:
    """The rows in a file of one kind."""
    data = datasets.Dataset.from_list(ROWS)
    if kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "arrow":
        with ArrowWriter(path=str(path)) as writer:
            writer.write_table(data.data.table)
            writer.finalize()
    elif kind == "tsv":
        data.to_csv(path, sep="\t")
    else:
        {"parquet": data.to_parquet, "jsonl": data.to_json, "csv": data.to_csv}[kind](path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "parquet", "arrow"])
def test_a_file_gives_its_records_in_order(tmp_path, kind):
    found = load_records(written(kind, tmp_path / f"a.{kind}"), cache_dir=tmp_path / "cache")
    assert found.to_list() == ROWS
    part = load_records(tmp_path / f"a.{kind}", columns=["none", "text"], max_documents=3, cache_dir=tmp_path / "cache")
    assert part.to_list() == [{"text": text} for text in TEXTS[:3]]


@pytest.mark.parametrize("packed", [gzip, bz2, lzma])
def test_compressed_files_are_read_too(tmp_path, packed):
    suffix = {gzip: ".gz", bz2: ".bz2", lzma: ".xz"}[packed]
    plain = written("jsonl", tmp_path / "a.jsonl")
    for file in (plain, written("csv", tmp_path / "b.csv")):
        (tmp_path / f"{file.name}{suffix}").write_bytes(packed.compress(file.read_bytes()))
        assert load_records(f"{file}{suffix}", cache_dir=tmp_path / "cache").to_list() == ROWS
    (tmp_path / f"c.txt{suffix}").write_bytes(packed.compress(b"a text\r\n"))
    assert load_records(tmp_path / f"c.txt{suffix}", cache_dir=tmp_path / "cache")["text"][:] == ["a text\r\n"]


def test_a_folder_of_several_kinds_gives_the_texts_in_the_order_of_their_paths(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"one\r\ntwo")
    written("jsonl", folder / "b.jsonl")
    written("csv", folder / "c.csv")
    (folder / "inner" / "d.py").write_text("d")
    (folder / ".hidden.txt").write_text("hidden")
    (folder / "e.pdf").write_text("no text")
    found = load_records(folder, columns=["text"], cache_dir=tmp_path / "cache")
    assert found["text"][:] == ["one\r\ntwo", *TEXTS, *TEXTS, "d"]


def test_a_program_named_as_a_split_is_one_of_the_sources(tmp_path):
    for name in ("train.py", "model.py", "train/loop.py"):
        (tmp_path / "sources" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sources" / name).write_text(name)
    read = load_records(tmp_path / "sources", cache_dir=tmp_path)
    assert sorted(read["text"]) == ["model.py", "train.py", "train/loop.py"]


def test_of_files_that_name_splits_one_split_is_read(tmp_path):
    (tmp_path / "data").mkdir()
    for file in ("train-00000-of-00002.parquet", "train-00001-of-00002.parquet", "test-00000-of-00001.parquet"):
        written("parquet", tmp_path / "data" / file)
    assert len(load_records(tmp_path / "data", cache_dir=tmp_path)) == 24
    assert len(load_records(tmp_path / "data", split="test", cache_dir=tmp_path)) == 12
    assert len(load_records(tmp_path / "data", split="test[:50%]", cache_dir=tmp_path)) == 6
    with pytest.raises(UserError, match=r"no file validation\.\*"):
        load_records(tmp_path / "data", split="validation", cache_dir=tmp_path)


def test_folders_of_save_to_disk_are_read(tmp_path):
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(tmp_path / "several")
    assert load_records(tmp_path / "one").to_list() == load_records(tmp_path / "several").to_list() == ROWS
    assert load_records(tmp_path / "several", split="test").to_list() == ROWS[:1]


def test_a_large_text_is_cut_into_documents_that_end_with_a_line_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "DOCUMENT_SIZE", 100)
    text = "".join(f"line {i} naïve 日本\r\n" for i in range(60)) + "日本" * 150 + "\nend"
    (tmp_path / "a.txt").write_bytes(text.encode())
    found = load_records(tmp_path / "a.txt", cache_dir=tmp_path)["text"][:]
    assert "".join(found) == text
    assert all(part.endswith("\r\n") for part in found[:10])
    assert max(map(len, found)) <= 200


def test_max_bytes_cuts_the_file_that_crosses_it_and_drops_an_incomplete_character(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.txt").write_text("é" * 10)
    (tmp_path / "c.txt").write_text("c")
    found = load_records(tmp_path, max_bytes=8, cache_dir=tmp_path / ".cache")
    assert found["text"][:] == ["abc", "éé"]


def test_a_changed_file_is_read_anew_and_an_unchanged_one_is_not(tmp_path):
    for name, old, new in (("a.txt", "one", "two"), ("a.jsonl", '{"text": "one"}', '{"text": "two"}')):
        (tmp_path / name).write_text(old)
        first = load_records(tmp_path / name, cache_dir=tmp_path / "cache").cache_files
        assert load_records(tmp_path / name, cache_dir=tmp_path / "cache").cache_files == first
        (tmp_path / name).write_text(new + " ")
        assert load_records(tmp_path / name, cache_dir=tmp_path / "cache")["text"][0].strip() == "two"


def test_another_encoding_is_read_when_it_is_named_and_asked_for_when_it_is_not(tmp_path):
    for encoding in ("latin-1", "utf-16"):
        file = tmp_path / f"{encoding}.txt"
        file.write_text("naïve\n", encoding=encoding)
        assert load_records(file, encoding=encoding, cache_dir=tmp_path)["text"][:] == ["naïve\n"]
        with pytest.raises(UserError, match="cannot be read: .* is not utf-8 .*; set data.encoding"):
            load_records(file, cache_dir=tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": ')
    with pytest.raises(UserError, match="bad.jsonl cannot be read: .*JSON"):
        load_records(tmp_path / "bad.jsonl", cache_dir=tmp_path)


def test_the_rollouts_of_each_round_leave_no_copy_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rollouts = [{"prompt_ids": [1, 2], "completion_ids": [3], "reward": float(i)} for i in range(4)]
    for number in range(2):
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(rollout) + "\n" for rollout in rollouts))
        data = RolloutDataModule(tmp_path / f"{number}.jsonl")
        data.setup()
        assert len(data.rows["train"]) == 4
    assert not [*tmp_path.rglob("*.arrow")]


def test_paths_columns_and_folders_without_data_are_named(tmp_path):
    with pytest.raises(UserError, match="there is no file or folder .*gone.jsonl"):
        load_records(tmp_path / "gone.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no file that ends in .txt"):
        load_records(tmp_path / "empty")
    with pytest.raises(UserError, match="has the columns number, text, and none of words"):
        load_records(written("jsonl", tmp_path / "a.jsonl"), columns=["words"], cache_dir=tmp_path)


_ON_THE_HUB = """
import json, sys
from lit_fused.data.records import load_records
for options in json.loads(sys.argv[1]):
    print(json.dumps(load_records("somebody/stories", **options).to_list()))
"""


@pytest.mark.slow
def test_a_name_on_the_hub_is_streamed_no_further_than_it_must_be_downloaded_and_found_again_without_it(tmp_path):
    def loaded(*options: dict[str, object], **environment: str) -> list[object]:
        # A process of its own, which reads the Hub's address when it starts.
        job = [sys.executable, "-c", _ON_THE_HUB, json.dumps(options)]
        done = subprocess.run(job, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    content = "".join(json.dumps(row) + " " * 2_000 + "\n" for row in ROWS * 4_000).encode()
    common = {"max_documents": 12, "cache_dir": str(tmp_path / "cache")}
    home = {"HF_HOME": str(tmp_path / "home")}
    with fake_hub(content) as hub:
        assert loaded({**common, "streaming": True}, HF_ENDPOINT=hub.endpoint, **home) == [ROWS]
        assert 0 < hub.furthest < len(content) / 2
        assert loaded(common, HF_ENDPOINT=hub.endpoint, **home) == [ROWS]
        assert hub.downloads == 1
    assert loaded(common, {**common, "streaming": True}, HF_HUB_OFFLINE="1", **home) == [ROWS, ROWS]
