"""data=hf: the datasets library's names, folders and files as documents, streamed or not, and no way to them said."""

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from chat_templates import make_tokenizer
from data_modules import hub_data, ready
from fake_hub import fake_hub

from lit_fused.data import FileSource, HubSource, PreferenceEncoding, TokenDataModule
from lit_fused.data.chat_template import CHATML
from lit_fused.errors import UserError

ROOT = Path(__file__).parents[2]
TEXTS = [f"document {i} " * 3 for i in range(50)]


@pytest.fixture(autouse=True)
def _own_datasets(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    datasets.disable_progress_bars()


@pytest.fixture
def data():
    return datasets.Dataset.from_dict({"text": TEXTS, "number": list(range(50))})


def contents(source):
    pieces = source.pieces()
    return [document.content for piece in pieces for document in source.read(piece)]


def write(data, kind, folder):
    """``data`` in one of the shapes in which it may lie on a disk; returns its path."""
    if kind == "saved":
        data.save_to_disk(folder)
        return folder
    if kind == "saved splits":
        datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(folder)
        return folder
    folder.mkdir()
    name, _, where = kind.partition(" ")
    file = folder / f"train.{name}"
    if name == "json":
        file.write_text(json.dumps(data.to_list()))
    else:
        {"parquet": data.to_parquet, "jsonl": data.to_json, "csv": data.to_csv}[name](file)
    return folder if where == "folder" else file


KINDS = ["saved", "saved splits", "parquet", "parquet folder", "jsonl", "json", "csv folder"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_folder_and_file_gives_its_texts_in_order(tmp_path, data, kind, streaming):
    path = write(data, kind, tmp_path / "data")
    assert contents(HubSource(path, streaming=streaming)) == TEXTS
    assert contents(HubSource(path, streaming=streaming, max_documents=7)) == TEXTS[:7]
    records = contents(HubSource(path, streaming=streaming, max_documents=2).select(None))
    assert records == [{"text": TEXTS[0], "number": 0}, {"text": TEXTS[1], "number": 1}]


def test_many_rows_are_several_pieces_that_make_up_the_whole(tmp_path):
    texts = [str(i) for i in range(25_000)]
    source = HubSource(write(datasets.Dataset.from_dict({"text": texts}), "parquet", tmp_path / "data"))
    assert len(source.pieces()) == 3
    assert contents(source) == texts
    last = list(source.read(source.pieces()[-1]))[-1]
    assert last.where().endswith("train.parquet, train, row 25000")


def test_a_source_travels_to_another_process(tmp_path, data):
    for kind in ("saved", "parquet"):
        for streaming in (False, True):
            source = HubSource(write(data, kind, tmp_path / f"{kind}{streaming}"), streaming=streaming)
            (piece,) = source.pieces()
            there = pickle.loads(pickle.dumps(source))
            assert [document.content for document in there.read(piece)] == TEXTS


def test_of_records_only_the_columns_of_use_are_read(tmp_path, data):
    path = write(data, "parquet", tmp_path / "data")
    for streaming in (False, True):
        source = HubSource(path, streaming=streaming, max_documents=1)
        (record,) = contents(source.select(None, ["no", "text"]))
        assert record == {"text": TEXTS[0]}
        (record,) = contents(source.select(None, ["no"]))
        assert record == {"text": TEXTS[0], "number": 0}  # so that a fault can say what there is


def test_a_stream_of_a_commit_is_known_without_asking_the_hub():
    (piece,) = HubSource("nobody/nothing", revision="a" * 40, streaming=True).pieces()
    assert piece.fingerprint == "a" * 40


def test_the_configurations_to_choose_from_are_named(tmp_path, data):
    write(data, "jsonl folder", tmp_path / "data")
    configs = "- config_name: english\n  data_files: train.jsonl\n- config_name: german\n  data_files: train.jsonl\n"
    (tmp_path / "data" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    with pytest.raises(UserError, match=r"cannot be read: Config name is missing.*english.*german"):
        HubSource(tmp_path / "data").pieces()
    assert contents(HubSource(tmp_path / "data", "german")) == TEXTS


def test_a_changed_file_has_another_fingerprint_and_the_same_identity(tmp_path, data):
    path = write(data, "jsonl", tmp_path / "data")
    before, again = HubSource(path), HubSource(path)
    assert before.pieces()[0].fingerprint == again.pieces()[0].fingerprint
    path.write_text(path.read_text().replace("document 1 ", "document X "))
    os.utime(path, (1, 1))
    after = HubSource(path)
    assert after.pieces()[0].fingerprint != before.pieces()[0].fingerprint
    assert after.identity() == before.identity()


def test_a_part_of_a_split_can_be_named(tmp_path, data):
    path = write(data, "parquet", tmp_path / "data")
    assert contents(HubSource(path, split="train[:10%]")) == TEXTS[:5]
    assert contents(HubSource(write(data, "saved splits", tmp_path / "saved"), split="test")) == TEXTS[:1]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("parquet", {"column": "body"}, "no column 'body'; those that are there: 'text', 'number'. Set data.text_col"),
        ("jsonl", {"column": "body", "streaming": True}, "no column 'body'; those that are there: 'text', 'number'"),
        ("parquet", {"split": "test"}, "data.split=test.* cannot be read: .*train"),
        ("parquet", {"split": "test", "streaming": True}, "data.split=test.* cannot be read: .*train"),
        ("saved splits", {"split": "dev"}, "has no split dev; those that are there: test, train"),
        ("saved", {"split": "dev"}, "one data set without splits; leave data.split at train"),
        ("csv folder", {"name": "german"}, "data.name=german.* cannot be read: .*german"),
    ],
)
def test_what_is_not_there_is_said_in_one_sentence(tmp_path, data, kind, options, message):
    options = dict(options)
    column = options.pop("column", "text")
    source = HubSource(write(data, kind, tmp_path / "data"), **options).select(column)
    with pytest.raises(UserError, match=message) as caught:
        contents(source)
    assert "\n" not in str(caught.value)


def test_a_file_of_another_suffix_and_a_broken_one_are_refused(tmp_path):
    (tmp_path / "a.docx").write_text("a")
    with pytest.raises(UserError, match=r"data.path must end in one of .jsonl, .json, .csv.* got .*a.docx"):
        HubSource(tmp_path / "a.docx").pieces()
    (tmp_path / "a.parquet").write_text("a")
    with pytest.raises(UserError, match=r"a.parquet .* cannot be read"):
        HubSource(tmp_path / "a.parquet").pieces()


def test_a_text_that_is_none_is_empty_and_a_number_is_a_fault(tmp_path):
    data = datasets.Dataset.from_dict({"text": ["a", None], "number": [1, 2]})
    path = write(data, "saved", tmp_path / "data")
    assert contents(HubSource(path)) == ["a", ""]
    assert [str(fault) for fault in contents(HubSource(path).select("number"))] == [
        "expected text in 'number', got int"
    ] * 2


# --- the data module -----------------------------------------------------------------------------------------------


def test_text_conversations_and_pairs_go_the_same_way(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    records = {
        "text": [f"{i} jumps" for i in range(40)],
        "chat": [[{"role": "user", "content": str(i)}, {"role": "assistant", "content": "fox"}] for i in range(40)],
        "prompt": [f"{i}:" for i in range(40)],
        "completion": ["dog"] * 40,
    }
    path = write(datasets.Dataset.from_dict(records), "parquet", tmp_path / "data")
    learned = {}
    for form, options in {"text": {}, "chat": {"messages_column": "chat"}, "instruction": {}}.items():
        module = ready(hub_data(path=path, format=form, tokenizer=tmp_path / "tokenizer", block_size=64, **options))
        store = module.prepared.train
        tokens, wanted = store.read(0, int(store.ends[0]))
        learned[form] = tokenizer.decode(tokens if wanted is None else tokens[wanted])
        assert module.packing == ("stream" if form == "text" else "documents")
        assert store.num_documents + module.prepared.val.num_documents == 40
    assert learned == {"text": "0 jumps</s>", "chat": "fox<|im_end|>", "instruction": "dog</s>"}


@pytest.mark.parametrize(("kind", "streaming"), [("parquet", False), ("saved", True)])
def test_preferences_are_those_of_the_same_records_in_a_file(tmp_path, kind, streaming):
    records = [{"good": f" {n} fox", "bad": " dog", "prompt": f"{n} +"} for n in range(20)]
    path = write(datasets.Dataset.from_list(records), kind, tmp_path / "data")
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    columns: Any = {"chosen": "good", "rejected": "bad"}
    options: Any = {"tokenizer": tmp_path / "tokenizer", "block_size": 64, "val_fraction": 0.2}
    hub = hub_data(path=path, format="preference", streaming=streaming, **columns, **options)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    file = TokenDataModule(FileSource(tmp_path / "pairs.jsonl"), PreferenceEncoding(**columns), **options)
    found = []
    for module in (hub, file):
        module.prepare_data()
        module.setup()
        found.append([row for rows in module.rows_in_order().values() for row in rows])
    assert len(found[0]) == len(records)
    first, second = (sorted(rows, key=lambda row: row["input_ids"].tolist()) for rows in found)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_an_option_of_another_format_is_refused(tmp_path):
    for options, message in (
        (
            {"format": "chat", "text_column": "body"},
            "data.text_column is for data.format=text, but data.format is chat",
        ),
        ({"messages_column": "m"}, "data.messages_column is for data.format=chat"),
        ({"format": "chat", "prompt": "q"}, "data.prompt is for data.format=instruction"),
        ({"format": "poem"}, "data.format must be one of text, chat, instruction, pairs, preference, got 'poem'"),
        ({"max_documents": 0}, "data.max_documents must be a whole number, 1 or more"),
        ({"format": "chat", "too_long": "bend"}, "data.too_long must be one of cut, skip, refuse, got 'bend'"),
        (
            {"too_long": "skip"},
            "data.too_long is for data.format=chat or instruction or pairs or preference, but data.format is",
        ),
    ):
        with pytest.raises(UserError, match=message):
            hub_data(path=tmp_path, **{"format": "text", **options})


# --- the Hub -------------------------------------------------------------------------------------------------------

_PREPARE = """
import json, sys, time
slept, sleep = [], time.sleep
time.sleep = lambda seconds: (slept.append(seconds), sleep(seconds))
from data_modules import hub_data
from lit_fused.errors import UserError
for options in json.loads(sys.argv[1]):
    module = hub_data(**{"format": "text", **options})
    try:
        module.prepare_data(); module.setup()
        store = module.prepared.train
        print(json.dumps([store.num_documents, module.prepared.val.num_documents]))
    except UserError as error:
        print(json.dumps(str(error)))
print(sum(slept))
"""


def prepared_elsewhere(tmp_path, options, **environment):
    """Prepare in a process of its own, which reads the Hub's address when it starts.

    Returns the results, and the seconds slept between attempts: unlike the clock's, they don't grow on a busy machine.
    """
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1", **environment}
    job = [sys.executable, "-c", _PREPARE, json.dumps(options)]
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'helpers'}"
    done = subprocess.run(job, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *results, slept = [json.loads(line) for line in done.stdout.splitlines()]
    return results, slept


@pytest.mark.slow
def test_the_hub_is_streamed_downloaded_and_found_again_without_it(tmp_path):
    line = json.dumps({"text": "a story that is long " * 100}).encode() + b"\n"
    content = b"".join(line.replace(b"a story", b"story %d" % i) for i in range(16_000))
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    common = {"path": "somebody/stories", "block_size": 64, "tokenizer": str(tmp_path / "tokenizer")}
    common["max_documents"] = 200
    with fake_hub(content) as hub:
        options = [
            {**common, "streaming": True},
            common,
            {**common, "revision": "gone"},
            {**common, "path": "somebody/gated"},
            {**common, "path": "nobody/nothing"},
        ]
        results, _ = prepared_elsewhere(tmp_path, options, HF_ENDPOINT=hub.endpoint)
    streamed, counts, gone, gated, nothing = results
    assert sum(counts) == 200
    assert streamed == counts
    assert 0 < hub.furthest < len(content) / 2  # of the stream
    assert hub.downloads == 1
    assert "Revision 'gone' doesn't exist for dataset 'somebody/stories'" in gone
    assert "'somebody/gated' doesn't exist on the Hub or cannot be accessed; look" in gated
    assert "'nobody/nothing' doesn't exist on the Hub" in nothing
    assert all("log in with `hf auth login`" in refusal and "\n" not in refusal for refusal in (gone, gated, nothing))

    results, _ = prepared_elsewhere(tmp_path, [common, {**common, "path": "nobody/nothing"}], HF_HUB_OFFLINE="1")
    assert results[0] == counts
    assert re.match(r"the data set nobody/nothing .* cannot be read: .*HF_HUB_OFFLINE is set, and the", results[1])
    assert "\n" not in results[1]


@pytest.mark.slow
def test_no_way_to_the_hub_is_one_sentence_at_once(tmp_path):
    options = [{"path": "somebody/stories"}, {"path": "somebody/stories", "streaming": True}]
    results, slept = prepared_elsewhere(tmp_path, options, HF_ENDPOINT="http://127.0.0.1:9")
    for result in results:
        assert result.startswith(
            "there is no file or folder somebody/stories, and the Hugging Face Hub cannot be asked"
        )
        assert "\n" not in result
        assert len(result) < 300
    assert slept < 10
