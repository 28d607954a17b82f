"""CSV, TSV and encodings: each row is a document, and a file in another encoding is read or named, never garbled."""

import csv
import gzip
import io

import pytest
from data_modules import ready, text_data

from lit_fused.data import FileSource
from lit_fused.data.source import DocumentError
from lit_fused.errors import UserError

TEXTS = ["plain", "with, comma; and\ttab", 'says "hi"', "two\nlines\r\nof it", " spaces ", "日本 🎉", "x" * 200_000]


def read(path, column="text", columns=(), **options):
    source = FileSource(path, **options).select(column, columns)
    return [document for piece in source.pieces() for document in source.read(piece)]


def contents(path, **options):
    return [document.content for document in read(path, **options)]


def written(path, rows, encoding="utf-8", **options):
    text = io.StringIO(newline="")
    csv.writer(text, **options).writerows(rows)
    data = text.getvalue().encode(encoding)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.csv", {}),
        ("a.csv", {"delimiter": ";"}),
        ("a.csv", {"delimiter": ";", "lineterminator": "\n"}),
        ("a.tsv", {"delimiter": "\t"}),
        ("a.csv.gz", {"quoting": csv.QUOTE_ALL}),
    ],
)
def test_a_table_of_separated_values_gives_the_texts_that_were_written(tmp_path, name, options, encoding):
    rows = [["id", "text"], *([str(i), text] for i, text in enumerate(TEXTS))]
    path = written(tmp_path / name, rows, encoding, **options)
    assert contents(path) == TEXTS
    assert contents(tmp_path) == TEXTS  # of the folder


def test_a_record_of_a_table_has_all_columns(tmp_path):
    path = written(tmp_path / "pairs.tsv", [["source", "target"], ["a b", "b a"]], delimiter="\t")
    assert contents(path, column=None, columns=["source", "target"]) == [{"source": "a b", "target": "b a"}]


def test_a_table_without_the_column_names_those_that_are_there(tmp_path):
    path = written(tmp_path / "a.csv", [["id", "content"], ["1", "a"]])
    (wrong,) = contents(path)
    assert isinstance(wrong, DocumentError)
    assert "there is no column 'text'; those that are there: 'id', 'content'" in str(wrong)


def test_a_broken_row_is_named_by_its_first_line_and_the_others_are_read(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('id,text\n1,"two\nlines"\n2,a,b\n\n3,c\n4,"x"y\n5,d\n6,"without end\n7,e\n')
    documents = read(path)
    assert [d.content for d in documents if isinstance(d.content, str)] == ["two\nlines", "c", "d"]
    wrong = [(d.where(), str(d.content)) for d in documents if not isinstance(d.content, str)]
    assert [where.rpartition(":")[2] for where, _ in wrong] == ["4", "7", "9"]
    assert "expected 2 fields, as the first row has, got 3" in wrong[0][1]
    assert "unexpected end of data" in wrong[2][1]


def test_two_columns_of_one_name_are_refused(tmp_path):
    path = written(tmp_path / "a.csv", [["text", "text"], ["a", "b"]])
    (wrong,) = contents(path)
    assert "expected a name for each column, but some have the same: text, text" in str(wrong)


def test_a_table_becomes_tokens(tmp_path):
    path = written(tmp_path / "a.csv", [["text"], *([text] for text in ["the quick fox jumps"] * 60)])
    data = ready(text_data(path=path, block_size=8, vocab_size=300, cache_dir=tmp_path / "cache"))
    assert data.prepared.report.documents["train"] == 60  # copies of one text are held out by their ends


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_byte_order_mark_tells_the_encoding_of_a_text_of_several_parts(tmp_path, encoding, suffix):
    marks = {"utf-16-le": "\ufeff", "utf-16-be": "\ufeff"}
    lines = [f"line {number} 日本\n" for number in range(400_000)]
    text = "".join(lines) if suffix == ".txt" else "".join(f'{{"text": "{line[:-1]}"}}\n' for line in lines[:1000])
    path = tmp_path / f"a{suffix}"
    path.write_bytes((marks.get(encoding, "") + text).encode(encoding))
    got = contents(path)
    assert "".join(map(str, got)) == text if suffix == ".txt" else got == [line[:-1] for line in lines[:1000]]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_without_a_mark_is_named_and_not_read_with_nulls_in_it(tmp_path, encoding):
    (tmp_path / "a.txt").write_bytes("plain English".encode(encoding))
    (wrong,) = contents(tmp_path / "a.txt")
    assert isinstance(wrong, DocumentError)
    assert f"so it is {encoding}; set data.encoding to what it is in" in str(wrong)
    assert contents(tmp_path / "a.txt", encoding=encoding) == ["plain English"]


@pytest.mark.parametrize(
    ("encoding", "text", "shown"),
    [
        ("cp1252", "Ein schöner Tag für die Bären, die über die Brücke gehen. " * 20, "schöner"),
        ("cp1251", "Привет, как дела? Сегодня хорошая погода. " * 20, "Привет"),
        ("shift_jis", "日本語の文章です。今日は天気がいいですね。" * 20, "日本語"),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.csv"])
def test_another_encoding_is_suggested_by_what_it_would_read(tmp_path, encoding, text, shown, name):
    (tmp_path / name).write_bytes(("text\n" + text).encode(encoding))
    (wrong,) = contents(tmp_path / name)
    assert isinstance(wrong, DocumentError)
    assert "set data.encoding to what it is in, perhaps " in str(wrong)
    assert shown in str(wrong)


def test_the_encoding_that_was_chosen_is_not_looked_for(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\xe9")
    assert contents(tmp_path / "a.txt", encoding="latin-1") == ["ÿþé"]
    (tmp_path / "b.txt").write_bytes("a".encode("utf-16"))
    with pytest.raises(UserError, match="data.max_bytes counts no utf-16 files"):
        contents(tmp_path / "b.txt", max_bytes=10)
