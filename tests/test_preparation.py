"""From files to a store of tokens: formats, the split, the cache, killed and competing processes, full disks, bad input."""

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

import lit_fused.data.preparation as preparation_module
import lit_fused.data.sources as sources_module
from lit_fused.data import Encoded, TextDataModule, TokenStore
from lit_fused.data.sources import FileSource
from lit_fused.data.split import choose_split
from lit_fused.data.tokenizer import train_tokenizer
from lit_fused.errors import UserError

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _own_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def small_pieces(monkeypatch):
    """Files of a few hundred bytes are several pieces, and several documents."""
    monkeypatch.setattr(sources_module, "_MIN_PIECE", 256)
    monkeypatch.setattr(sources_module, "DOCUMENT_BYTES", 64)


def contents(source):
    return [document.content for piece in source.pieces() for document in source.read(piece)]


def text_module(path, **options):
    return TextDataModule(path, **{"block_size": 4, "vocab_size": 300, "val_fraction": 0.2} | options)


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
    with pytest.raises(UserError, match="tokens.bin has 18 bytes, but 20 are needed; delete it"):
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
        records = contents(FileSource(tmp_path, column=None))
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

    for name in ("_split", "_trained", "_encode"):
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
    encode = preparation_module._encode

    def encode_and_append(*args):
        outcome = encode(*args)
        with (tmp_path / "a.jsonl").open("a") as file:
            file.write('{"text": "one more"}\n')
        return outcome

    monkeypatch.setattr(preparation_module, "_encode", encode_and_append)
    assert "was changed while it was being prepared; run again" in refusal(tmp_path / "a.jsonl")


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
    append = preparation_module.TokenWriter.append

    def append_then_die(writer, document):
        append(writer, document)
        if len(list(cache.glob(".*.work/pieces/*/outcome.json"))) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    def die():
        preparation_module.TokenWriter.append = append_then_die
        text_module(tmp_path / "a.jsonl").prepare()

    assert in_a_fork(die) == -signal.SIGKILL
    [work] = cache.iterdir()
    assert work.name.startswith(".text-")
    pieces = {path.name: path.stat().st_ino for path in (work / "pieces").iterdir() if path.suffix != ".tmp"}
    assert (len(pieces), len(list((work / "pieces").glob("*.tmp")))) == (3, 1)

    encoded = []
    monkeypatch.setattr(
        preparation_module._Job,
        "encode",
        lambda job, piece, *args, encode=preparation_module._Job.encode: (
            encoded.append(piece) or encode(job, piece, *args)
        ),
    )
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


def job(corpus, cache, log, *, workers=0, seconds=0.0):
    command = [sys.executable, str(ROOT / "tests" / "preparation_job.py")]
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
    num_documents = write_corpus(tmp_path / "a.jsonl", 60_000_000)
    cache = tmp_path / "cache"
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
    assert text.endswith("the quick brown fox jumps over the lazy d")


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
        assert {path.name for path in work.iterdir()} <= {"lock", "pieces"} | {
            path.name for path in work.glob("split-*")
        }
        subprocess.run(["mount", "-o", "remount,size=400m", disk], check=True)
        finished(job(tmp_path / "a.jsonl", disk / "cache", tmp_path / "log2", workers=2))
        kept = num_documents - encoded_documents(tmp_path / "log2")
        assert kept > 0
        [folder] = (disk / "cache").iterdir()
        assert sum(TokenStore(folder / side).num_documents for side in ("train", "val")) == num_documents
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    peaks = []
    for num_bytes in (50_000_000, 500_000_000):
        write_corpus(tmp_path / "a.jsonl", num_bytes)
        process = job(tmp_path / "a.jsonl", tmp_path / "cache", tmp_path / "log", workers=2)
        peaks.append(peak_mib(process))
        finished(process)
    assert peaks[1] < peaks[0] + 100
    assert peaks[1] < 1500


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
