"""From files to a store of tokens: formats, split, cache, killed and competing processes, full disks, bad input."""

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import TINY_MODEL, text_folder, train
from data_modules import ready, text_data, tokens_data
from huggingface_hub import constants
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import lit_fused.data.file_source as file_source_module
import lit_fused.data.piece_encoding as piece_encoding_module
import lit_fused.data.preparation as preparation_module
from lit_fused.data import Encoded, FileSource, TextEncoding, TokenArrays, TokenStore
from lit_fused.data.source import DocumentError
from lit_fused.data.split import choose_split
from lit_fused.data.tokenizer import load_tokenizer, train_tokenizer
from lit_fused.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small_pieces(monkeypatch):
    """Files of a few hundred bytes are several pieces, and several documents."""
    monkeypatch.setattr(file_source_module, "_MIN_PIECE", 256)
    monkeypatch.setattr(file_source_module, "DOCUMENT_BYTES", 64)


def contents(source) -> list[Any]:
    return [document.content for piece in source.pieces() for document in source.read(piece)]


def text_module(path, **options):
    return text_data(path=path, **{"block_size": 4, "vocab_size": 300, "val_fraction": 0.2} | options)


def all_tokens(store):
    return store.read(0, store.num_tokens)[0].tolist()


def refusal(path, **options):
    with pytest.raises(UserError) as error:
        text_module(path, **options).prepare()
    return str(error.value)


def tree(folder):
    """Every file below, with its time of change and its size."""
    return {str(f.relative_to(folder)): (f.stat().st_mtime_ns, f.stat().st_size) for f in sorted(folder.rglob("*"))}


def write_lines(file, documents):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))


DOCUMENTS = [f"document {i}: naïve 日本 {'word ' * (i % 7)}\nand a second line\n" for i in range(60)]

# --- the store ---------------------------------------------------------------------------------------------------


def test_a_store_gives_back_the_documents_and_where_loss_is_wanted(tmp_path):
    documents = [
        Encoded(np.array([3, 1, 2])),
        Encoded(np.array([], np.int64)),
        Encoded(np.array([4, 0]), np.array([True, False])),
        Encoded(np.array([5])),
    ]
    store = pickle.loads(pickle.dumps(TokenStore.write(tmp_path / "store", documents, 300)))
    assert (store.num_documents, store.num_tokens, store.vocab_size) == (3, 6, 300)
    assert store.ends.tolist() == [3, 5, 6]
    assert store.lengths.tolist() == [3, 2, 1]
    tokens, wanted = store.read(1, 6)
    assert (tokens.dtype, wanted.dtype) == (np.int64, np.bool_)
    assert tokens.tolist() == [1, 2, 4, 0, 5]
    assert wanted.tolist() == [True, True, True, False, True]
    assert TokenStore.write(tmp_path / "all", documents[:1], 300).read(0, 3)[1] is None


@pytest.mark.parametrize(("vocab_size", "bytes_each"), [(65536, 2), (65537, 4)])
def test_tokens_take_two_bytes_where_the_vocabulary_allows_it(tmp_path, vocab_size, bytes_each):
    store = TokenStore.write(tmp_path / "store", [Encoded(np.array([0, vocab_size - 1]))], vocab_size)
    assert (tmp_path / "store" / "tokens.bin").stat().st_size == 2 * bytes_each
    assert all_tokens(store) == [0, vocab_size - 1]
    for wrong in (-1, vocab_size):
        with pytest.raises(ValueError, match=rf"must lie in \[0, {vocab_size}\)"):
            TokenStore.write(tmp_path / f"wrong{wrong}", [Encoded(np.array([wrong]))], vocab_size)


def test_a_store_that_lost_bytes_is_refused(tmp_path):
    TokenStore.write(tmp_path / "store", [Encoded(np.arange(10))], 300)
    os.truncate(tmp_path / "store" / "tokens.bin", 18)
    with pytest.raises(UserError, match="tokens.bin has 18 bytes, not the 20 that store.json tells of; delete"):
        TokenStore(tmp_path / "store")
    with pytest.raises(UserError, match="should be a folder of prepared tokens"):
        TokenStore(tmp_path)


# --- sources -----------------------------------------------------------------------------------------------------


def zstd(content):
    """In two frames, one behind the other, as parallel compressors write them."""
    half = len(content) // 2
    return b"".join(pa.compress(part, "zstd", asbytes=True) for part in (content[:half], content[half:]))


PACKERS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize("suffix", [".txt", ".md", ".py", ".jsonl", ".parquet"])
def test_every_format_yields_its_documents_also_compressed(tmp_path, suffix, packed):
    texts = ["first\r\ndocument 日本\n", "second"]
    if suffix == ".jsonl":
        content = b"\xef\xbb\xbf" + b"\n \n".join(json.dumps({"id": 1, "text": text}).encode() for text in texts)
    elif suffix == ".parquet":
        sink = io.BytesIO()
        pq.write_table(pa.table({"id": [1, 2], "text": texts}), sink, row_group_size=1)
        content = sink.getvalue()
    else:
        texts = texts[:1]
        content = texts[0].encode()
    (tmp_path / f"a{suffix}{packed}").write_bytes(PACKERS[packed](content))
    for path in (tmp_path, tmp_path / f"a{suffix}{packed}"):
        assert contents(FileSource(path)) == texts
    if suffix in (".jsonl", ".parquet"):
        records = contents(FileSource(tmp_path).select(None))
        assert [record["text"] for record in records] == texts
        assert records[0]["id"] == 1


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1", "shift_jis"])
def test_another_encoding_is_read_when_it_is_named(tmp_path, encoding):
    text = {"latin-1": "naïve\n", "shift_jis": "日本\n"}.get(encoding, "naïve 日本\n") * 3
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    (tmp_path / "b.jsonl").write_bytes(json.dumps({"text": text}, ensure_ascii=False).encode(encoding))
    assert contents(FileSource(tmp_path, encoding=encoding)) == [text, text]


@pytest.mark.parametrize(
    "line", ["short\n", "日本語のテキスト", "a line of nearly as many bytes as a document has at most\n"]
)
def test_a_large_text_is_cut_into_documents_of_whole_lines_and_characters_and_loses_nothing(
    tmp_path, small_pieces, line
):
    text = line * 100
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    source = FileSource(tmp_path)
    documents = contents(source)
    assert len(source.pieces()) > 2
    assert "".join(documents) == text
    assert max(len(document.encode()) for document in documents) < 64 + max(64, len(line.encode()))
    if line.endswith("\n"):
        assert all(document.endswith("\n") for document in documents if document)


def test_pieces_of_json_lines_and_of_parquet_hold_each_document_once_and_know_where_it_stands(tmp_path, small_pieces):
    write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    pq.write_table(pa.table({"text": DOCUMENTS}), tmp_path / "b.parquet", row_group_size=7)
    for name, where in (("a.jsonl", "{}:{}"), ("b.parquet", "{}, row {}")):
        source = FileSource(tmp_path / name)
        documents = [document for piece in source.pieces() for document in source.read(piece)]
        assert len(source.pieces()) > 3
        assert [document.content for document in documents] == DOCUMENTS
        assert documents[40].where() == where.format(tmp_path / name, 41)


# --- the split ---------------------------------------------------------------------------------------------------


def sides(documents, fraction):
    split = choose_split(documents, fraction)
    found = {"train": [], "val": []}
    for document in documents:
        for side, part in split.sides(document):
            found[side].append(part)
    return found["train"], found["val"]


def test_the_split_depends_on_what_the_documents_say_and_not_on_their_order():
    documents = [f"document {i}" for i in range(500)]
    train, val = sides(documents, 0.2)
    assert sorted(train + val) == sorted(documents)
    assert 70 < len(val) < 130
    assert sides(documents[::-1], 0.2) == (train[::-1], val[::-1])
    train_again, val_again = sides(documents + documents, 0.2)
    assert not set(train_again) & set(val_again)  # copies are on one side
    records = [{"a": i, "b": "x"} for i in range(500)]
    assert sides(records, 0.2)[1] == sides([{"b": "x", "a": i} for i in range(500)], 0.2)[1]


def test_a_single_document_lends_its_tail_cut_at_a_line_boundary():
    text = "".join(f"line {i}\n" for i in range(100))
    [train], [val] = sides([text], 0.1)
    assert train + val == text
    assert train.endswith("\n")
    assert 0.08 < len(val) / len(text) < 0.12


@pytest.mark.parametrize("text", ["ab", "no line boundary anywhere", "one\ntwo", "\n\n"])
@pytest.mark.parametrize("fraction", [1e-9, 0.999999])
def test_both_splits_of_the_smallest_text_are_non_empty(text, fraction):
    [train], [val] = sides([text], fraction)
    assert train
    assert val
    assert train + val == text


def test_neither_side_of_a_few_documents_is_empty():
    documents = ["a\n" * 50, "b\n" * 80, "c\n" * 60]
    train, val = sides(documents, 1e-9)
    assert (train, val) == ([documents[0], "b\n" * 79, documents[2]], ["b\n"])
    train, val = sides(documents, 1 - 1e-9)
    assert (len(train), len(val)) == (1, 2)
    records = [{"a": 1}, {"a": 2}, {"a": 3}]
    assert [len(side) for side in sides(records, 1e-9)] == [2, 1]
    assert [len(side) for side in sides(records, 1 - 1e-9)] == [1, 2]
    with pytest.raises(UserError, match="two different documents are needed.* there are 2, all the same"):
        choose_split([{"a": 1}, {"a": 1}], 0.1)


# --- the preparation ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_stores_hold_each_document_and_its_end_whatever_the_number_of_processes(tmp_path, small_pieces):
    write_lines(tmp_path / "in" / "a.jsonl", DOCUMENTS)
    reports = [
        text_module(tmp_path / "in", cache_dir=tmp_path / f"cache{n}", prepare_workers=n).prepare() for n in (0, 2)
    ]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(Path(reports[0].folder) / "tokenizer")
    train, val = sides(DOCUMENTS, 0.2)
    for report in reports:
        assert report.pieces["total"] > 3
        for name, documents in (("train", train), ("val", val)):
            expected = [[*tokenizer.encode(document), 0] for document in documents]
            store = TokenStore(Path(report.folder) / name)
            assert all_tokens(store) == [token for tokens in expected for token in tokens]
            assert store.lengths.tolist() == [len(tokens) for tokens in expected]
            assert (report.documents[name], report.tokens[name]) == (len(documents), store.num_tokens)


def test_renamed_files_are_split_alike(tmp_path):
    for i, document in enumerate(DOCUMENTS):
        (tmp_path / f"{i:02}.txt").write_text(document)
    first = text_module(tmp_path).prepare()
    for i in range(len(DOCUMENTS)):
        (tmp_path / f"{i:02}.txt").rename(tmp_path / f"z{59 - i:02}.md")
    second = text_module(tmp_path).prepare()
    assert first.folder != second.folder
    decoded = []
    for report in (first, second):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(Path(report.folder) / "tokenizer")
        text = tokenizer.decode(all_tokens(TokenStore(Path(report.folder) / "val")))
        decoded.append(sorted(text.split("<|endoftext|>")))
    assert decoded[0] == decoded[1]


def test_the_second_time_nothing_is_done_and_nothing_touched(tmp_path, monkeypatch):
    write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    first = text_module(tmp_path / "a.jsonl").prepare()
    assert not first.cached
    before = tree(tmp_path)

    def refuse(*_):
        raise AssertionError("prepared again")

    for name in ("_split", "_trained", "encode_pieces"):
        monkeypatch.setattr(preparation_module, name, refuse)
    second = text_module(tmp_path / "a.jsonl", batch_size=3, block_size=5, prepare_workers=2).prepare()
    assert second.cached
    assert str(second).startswith("cached ")
    assert (second.folder, second.tokens) == (first.folder, first.tokens)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "change", [{"vocab_size": 299}, {"val_fraction": 0.1}, {"max_bytes": 900}, {"encoding": "latin-1"}]
)
def test_another_parameter_is_prepared_apart(tmp_path, change):
    write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    folders = {text_module(tmp_path / "a.jsonl", **options).prepare().folder for options in ({}, change)}
    assert len(folders) == 2


def test_a_changed_file_is_prepared_apart_and_only_its_own_pieces_anew(tmp_path, small_pieces):
    train_tokenizer(DOCUMENTS, 300).save_pretrained(tmp_path / "tokenizer")
    for name in ("a", "b"):
        write_lines(tmp_path / "in" / f"{name}.jsonl", [f"{name} {document}" for document in DOCUMENTS])
    with (tmp_path / "in" / "b.jsonl").open("a") as file:
        file.write("no json\n")
    options = {"tokenizer": str(tmp_path / "tokenizer")}
    assert f"{tmp_path / 'in' / 'b.jsonl'}:61: expected one JSON object" in refusal(tmp_path / "in", **options)
    write_lines(tmp_path / "in" / "b.jsonl", [f"b {document}" for document in DOCUMENTS])
    report = text_module(tmp_path / "in", **options).prepare()
    assert 3 < report.pieces["resumed"] < report.pieces["total"] - 3
    assert sum(report.documents.values()) == 120
    assert [path.name for path in (tmp_path / "cache" / "lit_fused").iterdir()] == [Path(report.folder).name]


def test_the_cache_holds_nothing_but_the_tokenizer_the_splits_and_the_report(tmp_path):
    write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    text_module(tmp_path / "a.jsonl", cache_dir=tmp_path / "chosen").prepare()
    [folder] = (tmp_path / "chosen").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["report.json", "tokenizer", "train", "val"]
    assert sorted(path.name for path in (folder / "train").iterdir()) == ["ends.npy", "store.json", "tokens.bin"]
    assert not (tmp_path / "cache").exists()


def test_inputs_that_change_meanwhile_are_refused(tmp_path, monkeypatch):
    write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    encode = preparation_module.encode_pieces

    def encode_and_append(*args):
        outcome = encode(*args)
        with (tmp_path / "a.jsonl").open("a") as file:
            file.write('{"text": "one more"}\n')
        return outcome

    monkeypatch.setattr(preparation_module, "encode_pieces", encode_and_append)
    assert "was changed while it was being prepared; run again" in refusal(tmp_path / "a.jsonl")


def test_an_array_that_changes_while_its_documents_are_looked_for_is_refused(tmp_path, monkeypatch):
    file, find = tmp_path / "tokens.bin", TokenArrays._ends

    def find_and_replace(self, path, *others):
        ends = find(self, path, *others)
        np.arange(3000, dtype=np.uint16).__mod__(40).tofile(path)
        return ends

    np.arange(3000, dtype=np.uint16).__mod__(50).tofile(file)
    monkeypatch.setattr(TokenArrays, "_ends", find_and_replace)
    data = tokens_data(path=file, vocab_size=60, block_size=8, cache_dir=tmp_path / "cache", eos_token_id=0)
    with pytest.raises(UserError, match=f"{file} was changed while it was being prepared; run again"):
        data.prepare()
    assert not [*(tmp_path / "cache").iterdir()]


# --- killed, two at once, a full disk ----------------------------------------------------------------------------


def in_a_fork(work):
    """The status with which a copy of this process ends that does ``work``."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_killed_preparation_leaves_no_cache_and_the_next_run_goes_on_from_the_finished_pieces(
    tmp_path, small_pieces, monkeypatch
):
    write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    cache = tmp_path / "cache" / "lit_fused"
    append = piece_encoding_module.TokenWriter.append

    def append_then_die(writer, document):
        append(writer, document)
        if len(list(cache.glob(".*.work/pieces/*/outcome.json"))) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    def die():
        monkeypatch.setattr(piece_encoding_module.TokenWriter, "append", append_then_die)
        text_module(tmp_path / "a.jsonl").prepare()

    assert in_a_fork(die) == -signal.SIGKILL
    [work] = cache.iterdir()
    assert work.name.startswith(".text-")
    pieces = {path.name: path.stat().st_ino for path in (work / "pieces").iterdir() if path.suffix != ".partial"}
    assert (len(pieces), len(list((work / "pieces").glob("*.partial")))) == (3, 1)

    encoded, encode = [], piece_encoding_module.PieceJob.encode
    monkeypatch.setattr(piece_encoding_module.PieceJob, "encode", lambda *args: encoded.append(args) or encode(*args))
    report = text_module(tmp_path / "a.jsonl").prepare()
    assert (report.pieces["resumed"], len(encoded)) == (3, report.pieces["total"] - 3)
    assert [path.name for path in cache.iterdir()] == [Path(report.folder).name]
    whole = text_module(tmp_path / "a.jsonl", cache_dir=tmp_path / "other").prepare()
    for name in ("train/tokens.bin", "train/ends.npy", "val/tokens.bin", "tokenizer/tokenizer.json"):
        assert (Path(report.folder) / name).read_bytes() == (Path(whole.folder) / name).read_bytes()


@pytest.mark.parametrize("moment", ["_split", "_trained", "write_report"])
def test_a_preparation_that_is_killed_at_any_other_moment_leaves_nothing_to_the_next(tmp_path, moment):
    write_lines(tmp_path / "a.jsonl", DOCUMENTS)

    def die():
        work = getattr(preparation_module, moment)

        def work_then_die(*args):
            work(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(preparation_module, moment, work_then_die)
        text_module(tmp_path / "a.jsonl").prepare()

    assert in_a_fork(die) == -signal.SIGKILL
    [work] = (tmp_path / "cache" / "lit_fused").iterdir()
    report = text_module(tmp_path / "a.jsonl").prepare()
    assert not work.exists()
    assert not report.cached
    whole = text_module(tmp_path / "a.jsonl", cache_dir=tmp_path / "other").prepare()
    for side in ("train", "val"):
        assert all_tokens(TokenStore(Path(report.folder) / side)) == all_tokens(TokenStore(Path(whole.folder) / side))


@pytest.mark.parametrize("signal_of", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_preparation_keeps_the_tokenizer_that_it_has_trained(tmp_path, monkeypatch, signal_of, capsys):
    write_lines(tmp_path / "a.jsonl", DOCUMENTS)

    def interrupted(*args):
        raise signal_of

    with monkeypatch.context() as first_run:
        first_run.setattr(preparation_module, "encode_pieces", interrupted)
        with pytest.raises(signal_of):
            text_module(tmp_path / "a.jsonl").prepare(show=True)
    report = text_module(tmp_path / "a.jsonl").prepare(show=True)
    assert capsys.readouterr().err.count("training a tokenizer") == 1
    assert [path.name for path in (tmp_path / "cache" / "lit_fused").iterdir()] == [Path(report.folder).name]
    whole = text_module(tmp_path / "a.jsonl", cache_dir=tmp_path / "other").prepare()
    for name in ("train/tokens.bin", "tokenizer/tokenizer.json"):
        assert (Path(report.folder) / name).read_bytes() == (Path(whole.folder) / name).read_bytes()


def job(corpus, cache, log, *, workers=0, seconds=0.0):
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "preparation_job.py")]
    command += [str(corpus), str(cache), str(workers), str(seconds), str(log)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process):
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return out, err


def encoded_documents(log):
    return sum(map(int, log.read_text().split()))


def write_corpus(file, num_bytes):
    """Lines of about a kilobyte, no two alike, written quickly. Returns their number."""
    filler = "the quick brown fox jumps over the lazy dog " * 22
    with file.open("w") as stream:
        for i in range(num_bytes // 1000):
            stream.write(f'{{"text": "{i:09d} {filler}"}}\n')
    return num_bytes // 1000


@pytest.mark.slow
def test_killed_with_its_workers_and_taken_up_by_two_at_once_no_finished_piece_is_done_again(tmp_path):
    num_documents = write_corpus(tmp_path / "a.jsonl", 40_000_000)
    cache = tmp_path / "prepared"
    process = job(tmp_path / "a.jsonl", cache, tmp_path / "log1", workers=2, seconds=0.05)
    end = time.monotonic() + 100
    while not (done := list(cache.glob(".*.work/pieces/*/outcome.json"))):
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    process.kill()
    process.communicate()
    psutil.wait_procs(children, timeout=20)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert [path.name for path in cache.iterdir()] == [done[0].parents[2].name]
    finished_pieces = list(cache.glob(".*.work/pieces/*/outcome.json"))
    kept = sum(TokenStore(file.parent / side).num_documents for file in finished_pieces for side in ("train", "val"))
    assert 0 < kept < num_documents

    both = [job(tmp_path / "a.jsonl", cache, tmp_path / "log2", seconds=0.02) for _ in range(2)]
    outputs = [finished(process) for process in both]
    assert encoded_documents(tmp_path / "log2") == num_documents - kept
    assert sorted(out.split()[0] for out, _ in outputs) == ["cached", "prepared"]
    assert sum("waiting for another process" in err for _, err in outputs) == 1
    [folder] = cache.iterdir()
    stores = [TokenStore(folder / side) for side in ("train", "val")]
    assert sum(store.num_documents for store in stores) == num_documents
    text = bytes(stores[0].read(0, 50)[0].astype(np.uint8)).decode()
    assert text.startswith("000000000 the quick brown fox")


def test_a_disk_that_fills_up_leaves_nothing_half_written_and_says_so(tmp_path):
    resource = pytest.importorskip("resource")
    write_lines(tmp_path / "a.jsonl", [f"{i} {'word ' * 200}" for i in range(200)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        message = refusal(tmp_path / "a.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    cache = tmp_path / "cache" / "lit_fused"
    assert f"the cache folder {cache} is full (File too large)" in message
    assert "make room and run again, or set data.cache_dir" in message
    assert list(cache.iterdir()) == []


@pytest.mark.slow
def test_on_a_full_file_system_finished_pieces_are_kept_and_taken_up_when_there_is_room(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs to be root, to mount a small file system")
    try:
        num_documents = write_corpus(tmp_path / "a.jsonl", 30_000_000)
        process = job(tmp_path / "a.jsonl", disk / "cache", tmp_path / "log1", workers=2)
        message = process.communicate(timeout=100)[1]
        assert process.returncode == 1
        assert f"the cache folder {disk / 'cache'} is full (No space left on device)" in message
        [work] = (disk / "cache").iterdir()
        pieces = list((work / "pieces").iterdir())
        assert pieces
        assert all((piece / "outcome.json").exists() for piece in pieces)
        assert sorted(path.name.split("-")[0] for path in work.iterdir()) == ["lock", "pieces"]
        subprocess.run(["mount", "-o", "remount,size=400m", disk], check=True)
        finished(job(tmp_path / "a.jsonl", disk / "cache", tmp_path / "log2"))
        kept = num_documents - encoded_documents(tmp_path / "log2")
        assert kept > 0
        [folder] = (disk / "cache").iterdir()
        assert sum(TokenStore(folder / side).num_documents for side in ("train", "val")) == num_documents
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    peaks = []  # MiB
    for num_bytes in (40_000_000, 500_000_000):
        write_corpus(tmp_path / "a.jsonl", num_bytes)
        process = job(tmp_path / "a.jsonl", tmp_path / "cache", tmp_path / "log", workers=2)
        peaks.append(peak_mib(process))
        finished(process)
    assert peaks[1] < peaks[0] + 350  # the text alone is 460 MB more; how full the queues are depends on the machine
    assert peaks[1] < 1500


@pytest.mark.slow
@pytest.mark.parametrize("gap", [" ", ""])
def test_a_line_of_40_megabytes_takes_little_more_memory_than_one_of_a_megabyte(tmp_path, gap):
    peaks = []
    generator = random.Random(2)
    words = ["".join(generator.choices("aeiournstlkm", k=generator.randrange(3, 9))) + gap for _ in range(20000)]
    for size in (1_000_000, 40_000_000):
        (tmp_path / "a.txt").write_text("".join(generator.choices(words, k=size // (6 + len(gap)))))
        command = [sys.executable, ROOT / "train.py", "mode=prepare", "data=text", f"data.path={tmp_path / 'a.txt'}"]
        command += [f"data.cache_dir={tmp_path}", "data.prepare_workers=2", f"hydra.run.dir={tmp_path}"]
        process = subprocess.Popen(command)
        peaks.append(peak_mib(process))
        assert process.wait() == 0
    assert peaks[1] < peaks[0] + 175, peaks
    assert peaks[1] < 500, peaks


def peak_mib(process):
    """The most memory that a process and its children have had together, shared pages counted once, until it ends."""
    peak = 0
    while process.poll() is None:
        total = 0
        try:
            for member in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
                total += member.memory_full_info().pss
        except psutil.Error:  # it has just ended
            continue
        peak = max(peak, total)
        time.sleep(0.2)
    return peak / 2**20


# --- bad input ---------------------------------------------------------------------------------------------------


def test_empty_files_and_texts_are_skipped_and_counted_and_nothing_else_is_refused(tmp_path):
    write_lines(tmp_path / "in" / "a.jsonl", [*DOCUMENTS, "", None])
    for name in ("b.txt", "c.jsonl", "d.md.gz"):
        (tmp_path / "in" / name).write_bytes(gzip.compress(b"") if name.endswith("gz") else b"")
    report = text_module(tmp_path / "in").prepare()
    assert (report.skipped, sum(report.documents.values())) == ({"empty": 5, "bad": 0}, 60)
    assert "5 empty" in str(report)
    (tmp_path / "in" / "a.jsonl").write_text("\n")
    assert f"{tmp_path / 'in'} is empty: there is no text in it" in refusal(tmp_path / "in")
    assert f"{tmp_path / 'in' / 'b.txt'} is empty" in refusal(tmp_path / "in" / "b.txt")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"no json", "expected one JSON object, but the line cannot be parsed: Expecting value"),
        (b'{"text": "cut', "expected one JSON object, but the line cannot be parsed: Unterminated string"),
        (b'["text"]', "expected one JSON object, got list"),
        (
            b'{"content": "a", "id": 1}',
            "there is no column 'text'; those that are there: 'content', 'id'",
        ),
        (b'{"text": 5}', "expected text in 'text', got int"),
        (b'{"text": "na\xefve"}', "expected utf-8 JSON, but it cannot be read: 'utf-8' codec can't decode byte 0xef"),
        (b'{"text": "half a pair: \\ud83d"}', "expected text, but it holds half of a surrogate pair"),
    ],
)
def test_a_bad_line_is_named_and_as_many_as_allowed_are_left_out_and_counted(tmp_path, line, message):
    file = tmp_path / "a.jsonl"
    write_lines(file, DOCUMENTS)
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([*lines[:40], line, *lines[40:]]))
    said = refusal(file)
    assert f"a document is bad, and data.max_bad_documents=0: {file}:41: {message}" in said
    assert "set data.max_bad_documents to how many may be left out" in said
    assert list((tmp_path / "cache" / "lit_fused").iterdir()) == []
    report = text_module(file, max_bad_documents=1).prepare()
    assert (report.skipped["bad"], sum(report.documents.values())) == (1, 60)
    assert f"1 bad; {file}:41: {message}" in str(report)
    assert f"{file}:41" in refusal(file)  # also where the cache has it
    file.write_bytes(b"\n".join([*lines[:40], line, *lines[40:], line]))
    assert "2 documents or more are bad, and data.max_bad_documents=1" in refusal(file, max_bad_documents=1)


def test_a_parquet_file_without_the_column_names_those_it_has(tmp_path):
    pq.write_table(pa.table({"content": ["a"], "id": [1]}), tmp_path / "a.parquet")
    message = refusal(tmp_path)
    assert f"{tmp_path / 'a.parquet'}: there is no column 'text'; those that are there: 'content', 'id'" in message
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nonsense")
    assert f"{tmp_path / 'a.parquet'}: expected Parquet, but it cannot be read" in refusal(tmp_path)


def test_a_file_in_another_encoding_is_named_also_in_a_folder_and_may_be_left_out(tmp_path):
    write_lines(tmp_path / "in" / "good.jsonl", DOCUMENTS)
    (tmp_path / "in" / "bad.txt").write_bytes("naïve".encode("latin-1"))
    for path in (tmp_path / "in", tmp_path / "in" / "bad.txt"):
        message = refusal(path)
        assert f"{tmp_path / 'in' / 'bad.txt'}: expected utf-8 text, but it cannot be read" in message
        assert "set data.encoding to what it is in" in message
    assert sum(text_module(tmp_path / "in", max_bad_documents=1).prepare().documents.values()) == 60
    assert "data.encoding must be an encoding that Python knows" in refusal(tmp_path, encoding="utf-9")


@pytest.mark.parametrize("packed", [".gz", ".bz2", ".xz", ".zst"])
def test_a_compressed_file_that_was_cut_off_is_named(tmp_path, packed):
    file = tmp_path / f"a.jsonl{packed}"
    content = b"".join(json.dumps({"text": os.urandom(99).hex()}).encode() + b"\n" for _ in range(100))
    file.write_bytes(PACKERS[packed](content)[:-30])
    assert f"{file}: expected utf-8 JSON, but it cannot be read" in refusal(file)


def test_a_path_that_is_missing_holds_nothing_to_read_or_leads_nowhere_is_named(tmp_path):
    assert f"{tmp_path / 'gone'} does not exist" in refusal(tmp_path / "gone")
    (tmp_path / "a.pdf").touch()
    assert f"the folder {tmp_path} holds no .txt, .md, .py, .jsonl, .parquet, .csv, .tsv file" in refusal(tmp_path)
    (tmp_path / "a.json.gz").touch()
    message = refusal(tmp_path / "a.json.gz")
    assert "a.json.gz is a table of another kind: read it with data=hf, or convert it to .jsonl" in message
    assert "data.text_column must be the name of a field or column; got None" in refusal(tmp_path, text_column=None)
    (tmp_path / "a.txt").symlink_to("nowhere")
    assert f"{tmp_path / 'a.txt'} cannot be read: No such file or directory" in refusal(tmp_path)


def test_max_bytes_is_refused_for_files_whose_bytes_are_not_text(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"text"))
    assert "data.max_bytes counts plain text and JSON files only" in refusal(tmp_path, max_bytes=5)


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs users")
def test_a_file_or_a_cache_without_permission_is_named():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_lines(folder / "in" / "a.txt", DOCUMENTS)
        (folder / "cache").mkdir(mode=0o555)
        (folder / "in" / "a.txt").chmod(0)
        folder.chmod(0o755)
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(65534)  # nobody: root may do anything
            message = refusal(folder / "in", cache_dir=folder / "cache")
            assert f"the cache folder {folder / 'cache'} cannot be written: Permission denied" in message
            with pytest.raises(UserError, match="expected utf-8 text, but it cannot be read: Permission denied"):
                choose(FileSource(folder / "in"))
        finally:
            os.seteuid(user)


def choose(source):
    for content in contents(source):
        if isinstance(content, DocumentError):
            raise content


# --- the tokenizer -----------------------------------------------------------------------------------------------


def word_tokenizer(**special):
    """As a foreign one: words, with whatever special tokens it has; with bos, its template begins a text with it."""
    words = ["[UNK]", "<s>", "</s>", "document", "word", "and", "a", "second", "line"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if "bos_token" in special:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **special)


def test_a_given_tokenizer_is_used_with_its_own_beginning_and_end_and_pads_with_its_end(tmp_path):
    word_tokenizer(bos_token="<s>", eos_token="</s>").save_pretrained(tmp_path / "tokenizer")
    write_lines(tmp_path / "a.jsonl", ["document a", "a second line", "word word </s>"] * 5 + ["and"])
    datamodule = ready(text_module(tmp_path / "a.jsonl", tokenizer=str(tmp_path / "tokenizer"), val_fraction=1e-9))
    assert all_tokens(datamodule.prepared.train)[:8] == [1, 3, 6, 2, 1, 6, 7, 8]
    assert all_tokens(datamodule.prepared.train)[9:14] == [1, 4, 4, 0, 0]  # "</s>", spelt out, ends nothing
    assert datamodule.tokenizer is not None
    assert (datamodule.pad_token_id, datamodule.tokenizer.pad_token, datamodule.vocab_size) == (2, None, 9)


def test_a_tokenizer_without_an_end_or_none_at_all_is_refused(tmp_path):
    word_tokenizer().save_pretrained(tmp_path / "tokenizer")
    write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    message = refusal(tmp_path / "a.jsonl", tokenizer=str(tmp_path / "tokenizer"))
    assert f"the tokenizer {tmp_path / 'tokenizer'} has no end-of-text token, which every document ends with" in message
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text("[]")
    for folder in (tmp_path, tmp_path / "tokenizer"):
        message = refusal(tmp_path / "a.jsonl", tokenizer=str(folder))
        assert f"no tokenizer could be loaded from data.tokenizer={folder}: " in message
        assert "\n" not in message


def test_a_tokenizer_learns_from_the_texts_around_words_without_end_and_a_little_of_those(tmp_path, monkeypatch):
    sample: list[str] = []
    monkeypatch.setattr("lit_fused.data.preparation._WITHOUT_SPACE", 100)
    monkeypatch.setattr(
        TextEncoding, "train", lambda _, texts, size: sample.extend(texts) or train_tokenizer(texts, size)
    )
    documents = (
        [f"{i}x{'QRST' * 200}" for i in range(5)] + ["word"] + [f"text {i} {'of words ' * 50}" for i in range(9)]
    )
    write_lines(tmp_path / "a.jsonl", documents)
    text_module(tmp_path / "a.jsonl").prepare_data()
    assert sum(map(len, [text for text in sample if "QRST" in text])) == 100
    assert sum("of words" in text for text in sample) > 3


def test_a_tokenizer_that_was_never_downloaded_is_refused_at_once_where_no_hub_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    message = refusal(tmp_path / "a.jsonl", tokenizer="no/such")
    assert "data.tokenizer=no/such: http://127.0.0.1:9 does not answer" in message


def test_a_tokenizer_in_the_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    train_tokenizer(DOCUMENTS, 300).save_pretrained(tmp_path / "mine")
    assert len(load_tokenizer("~/mine")) == len(train_tokenizer(DOCUMENTS, 300))


def test_a_long_document_is_encoded_in_slices_that_end_with_a_line(monkeypatch):
    monkeypatch.setattr("lit_fused.data.encoding._SLICE", 30)
    encoder = TextEncoding().encoder(train_tokenizer(DOCUMENTS, 300), 0)
    [encoded] = encoder(["".join(DOCUMENTS)])
    assert encoder.tokenizer.decode(encoded.tokens[:-1]) == "".join(DOCUMENTS)
    assert encoded.tokens.tolist().count(0) == 1


def test_the_tokenizer_is_trained_on_a_bounded_sample_of_the_training_documents_of_every_piece(
    tmp_path, small_pieces, monkeypatch
):
    seen = []
    monkeypatch.setattr(preparation_module, "SAMPLE_CHARACTERS", 1000)
    monkeypatch.setattr(
        "lit_fused.data.encoding.train_tokenizer",
        lambda documents, size, **options: seen.extend(documents) or train_tokenizer(documents, size, **options),
    )
    documents = [f"{i:03d} {document}" for i, document in enumerate(DOCUMENTS)]
    write_lines(tmp_path / "a.jsonl", documents)
    text_module(tmp_path / "a.jsonl").prepare()
    assert 500 < sum(map(len, seen)) <= 1000
    sampled = {int(part[:3]) for part in seen if len(part) > 2}
    train, _ = sides(documents, 0.2)
    assert sampled <= {int(document[:3]) for document in train}
    assert min(sampled) < 5
    assert max(sampled) > 55


# --- tokens ------------------------------------------------------------------------------------------------------


def tokens_module(path, **options):
    return ready(tokens_data(path=path, **{"vocab_size": 1000, "block_size": 8, "val_fraction": 0.25} | options))


@pytest.mark.parametrize(
    ("name", "dtype"), [("a.bin", "uint16"), ("a.bin", "uint32"), ("a.npy", "int64"), ("a.npy", ">u2")]
)
def test_tokens_are_read_where_they_lie_and_split_at_the_nearest_end_of_a_document(tmp_path, name, dtype):
    tokens = np.tile(np.arange(10), 12)[:115]  # 9 ends a document: at 10, 20, ...
    save = np.save if name.endswith("npy") else (lambda file, array: array.tofile(file))
    save(tmp_path / name, tokens.astype(dtype))
    options = {"dtype": dtype} if name.endswith("bin") else {}
    prepared = tokens_module(tmp_path / name, eos_token_id=9, **options).prepared
    assert (prepared.train.num_documents, prepared.val.num_documents) == (9, 3)
    assert prepared.train.ends.tolist() == [*range(10, 100, 10)]
    assert prepared.val.lengths.tolist() == [10, 10, 5]
    assert all_tokens(prepared.train) + all_tokens(prepared.val) == tokens.tolist()
    assert not list(tmp_path.glob("cache/**/*.bin"))
    whole = tokens_module(tmp_path / name, **options).prepared
    assert (whole.train.num_documents, whole.train.num_tokens, whole.val.num_tokens) == (1, 87, 28)
    apart = tokens_module(tmp_path / name, val_path=tmp_path / name, **options)
    assert all_tokens(apart.prepared.train) == all_tokens(apart.prepared.val) == tokens.tolist()
    assert apart.tokenizer is None
    assert apart.prepare().cached


def test_the_ends_of_documents_come_from_the_tokenizer_where_no_token_is_named(tmp_path):
    word_tokenizer(eos_token="</s>").save_pretrained(tmp_path / "tokenizer")
    np.array([3, 2, 4, 5, 2, 6, 2, 7, 8, 2] * 2, np.uint16).tofile(tmp_path / "a.bin")
    datamodule = tokens_module(tmp_path / "a.bin", vocab_size=9, tokenizer=str(tmp_path / "tokenizer"))
    assert datamodule.prepared.train.lengths.tolist() == [2, 3, 2, 3, 2, 3]
    assert datamodule.tokenizer is not None
    assert datamodule.tokenizer.eos_token == "</s>"


@pytest.mark.parametrize(
    ("name", "array", "options", "message"),
    [
        ("a.bin", np.arange(100, dtype="<u2"), {"vocab_size": 50}, "holds the token 99, and data.vocab_size=50"),
        ("a.npy", np.array([-1, 1]), {}, "holds the token -1, and data.vocab_size=1000"),
        (
            "a.bin",
            np.arange(100, dtype="<u4"),
            {},
            "these are the halves of four-byte tokens; set data.dtype",
        ),
        ("a.bin", np.zeros(3, "u1"), {}, "cannot be read: Size of available data is not a multiple"),
        ("a.bin", np.zeros(1, "<u2"), {}, "holds 1 token(s), too few to train on"),
        ("a.npy", np.zeros((2, 2), int), {}, "has the shape (2, 2) and the type int64"),
        ("a.npy", np.zeros(9), {}, "has the shape (9,) and the type float64"),
        ("a.txt", np.zeros(9, "<u2"), {}, "must be a .bin file of tokens or a one-dimensional .npy file"),
        (None, None, {}, "cannot be read: No such file or directory"),
        (
            "a.bin",
            np.arange(6, dtype="<u2"),
            {},
            "has 5 tokens, but one block needs data.block_size=8",
        ),
        ("a.bin", np.zeros(9, "<u2"), {"dtype": "int8"}, "data.dtype must be one of uint16, uint32, got 'int8'"),
        ("a.bin", np.zeros(9, "<u2"), {"vocab_size": 1}, "data.vocab_size must be a whole number, 2 or more, got 1"),
    ],
)
def test_what_are_no_tokens_is_refused(tmp_path, name, array, options, message):
    if name is not None:
        (np.save if name.endswith("npy") else (lambda file, array: array.tofile(file)))(tmp_path / name, array)
    with pytest.raises(UserError) as error:
        tokens_module(tmp_path / (name or "gone.bin"), **options)
    assert message in str(error.value)


# --- the command -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_mode_prepare_shows_a_bar_on_a_terminal_and_lines_in_a_file_and_says_what_it_did(tmp_path):
    pty = pytest.importorskip("pty")
    write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    command = [sys.executable, str(ROOT / "train.py"), "mode=prepare", "data=text", f"data.path={tmp_path / 'a.jsonl'}"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        assert process.stdout is not None
        said = process.stdout.read().decode()
    bar = os.read(ours, 2**16).decode()
    os.close(ours)
    assert process.returncode == 0
    assert f"preparing {tmp_path / 'a.jsonl'}" in bar.replace("\r\n", "")
    assert "100%" in bar
    rows = dict(line.split(maxsplit=1) for line in said.splitlines())
    assert rows["prepared"] == str(tmp_path / "a.jsonl")
    assert "to train on" in rows["documents"]
    assert Path(rows["folder"], "report.json").exists()
    second = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert second.stdout.startswith(f"cached      {tmp_path / 'a.jsonl'}\n")
    assert second.stderr == ""


@pytest.mark.slow
def test_of_two_ranks_one_prepares_and_both_train(tmp_path):
    overrides = ["data=text", f"data.path={text_folder(tmp_path)}", "data.vocab_size=400", "data.block_size=32"]
    distributed = ["trainer.accelerator=cpu", "trainer.devices=2", "strategy=ddp", "trainer.max_steps=2"]
    finished = train(tmp_path, *overrides, *distributed, *TINY_MODEL, "callbacks=measure", "hydra.run.dir=out")
    assert finished.status == 0, finished.output
    assert finished.output.count(f"preparing {tmp_path}") == 1
    assert "waiting for another process" not in finished.output
    [folder] = (tmp_path / "cache" / "lit_fused").iterdir()
    assert json.loads((folder / "report.json").read_text())["documents"] == {"train": 20, "val": 1}
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["status"] == "completed"


@pytest.mark.slow
def test_a_script_that_its_workers_would_run_again_ends_with_a_sentence(tmp_path):
    write_corpus(tmp_path / "a.jsonl", 20_000_000)
    (tmp_path / "script.py").write_text(
        "from lit_fused.data import FileSource, TextEncoding, TokenDataModule\n"
        "TokenDataModule(FileSource('a.jsonl'), TextEncoding(), vocab_size=300, prepare_workers=2).prepare()"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 1
    assert "must do its work below `if __name__ == " in done.stderr.splitlines()[-1]
