"""From records to tokens: the split, the tokenizer, the cache, several processes, and tokens that are there already."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import TINY_MODEL, summary, text_folder, train
from data_modules import ready, text_data, tokens_data
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lit_fused.data import TextEncoding, TokenDataModule, tokenized
from lit_fused.data.split import choose_split
from lit_fused.errors import UserError

DOCUMENTS = [f"document {i}: naïve 日本 {'word ' * (i % 7)}\nand a second line\n" for i in range(60)]


def text_module(path: Any, **options: Any) -> TokenDataModule:
    return text_data(path=path, **{"block_size": 4, "vocab_size": 300, "val_fraction": 0.2} | options)


def all_tokens(tokens: Any) -> list[int]:
    return tokens.read(0, tokens.num_tokens)[0].tolist()


def refusal(path: Any, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        text_module(path, **options).prepare_data()
    return str(error.value)


def write_lines(file: Path, documents: list[str]) -> None:
    file.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))


def sides(documents: Any, fraction: float) -> tuple[list[Any], list[Any]]:
    """Return what is trained on, and what is held out."""
    split = choose_split(documents, fraction)
    parts = [part for document in documents for part in split.sides(document)]
    return [part for is_out, part in parts if not is_out], [part for is_out, part in parts if is_out]


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


@pytest.mark.parametrize("workers", [1, 3])
def test_each_document_and_its_end_are_there_once_whatever_the_number_of_processes(tmp_path, workers):
    write_lines(tmp_path / "a.jsonl", [*DOCUMENTS, ""])
    data = ready(text_module(tmp_path / "a.jsonl", prepare_workers=workers))
    assert data.tokenizer is not None
    for tokens, texts in zip((data.prepared.train, data.prepared.val), sides(DOCUMENTS, 0.2), strict=True):
        expected = [[*data.tokenizer.encode(text), 0] for text in texts]
        stream = [token for document in expected for token in document]
        assert all_tokens(tokens) == stream
        assert tokens.lengths.tolist() == [*map(len, expected)]
        half = tokens.num_tokens // 2
        assert tokens.read(half, half + 9)[0].tolist() == stream[half : half + 9]


def test_the_second_time_nothing_is_read_trained_or_encoded(tmp_path, monkeypatch):
    write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    first = text_module(tmp_path / "a.jsonl", cache_dir=tmp_path / "cache").prepared
    monkeypatch.setattr(TextEncoding, "train", None)
    monkeypatch.setattr(tokenized._Encode, "__call__", None)
    again = text_module(tmp_path / "a.jsonl", cache_dir=tmp_path / "cache", block_size=16).prepared
    assert all_tokens(again.train) == all_tokens(first.train)


@pytest.mark.parametrize("options", [{"vocab_size": 280}, {"val_fraction": 0.4}])
def test_another_option_is_prepared_anew_and_so_is_another_text(tmp_path, options):
    write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    first = all_tokens(text_module(tmp_path / "a.jsonl").prepared.train)
    assert all_tokens(text_module(tmp_path / "a.jsonl", **options).prepared.train) != first
    write_lines(tmp_path / "a.jsonl", [*DOCUMENTS[:-1], "other words and one more"])
    assert all_tokens(text_module(tmp_path / "a.jsonl").prepared.train) != first


def test_a_tokenizer_is_trained_on_a_bounded_sample_from_all_of_many_documents_or_from_each_of_a_few(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tokenized, "_SAMPLE", 1000)
    for count, sampled in ((300, range(4, 62)), (10, range(6, 11))):
        seen: list[str] = []
        monkeypatch.setattr(
            TextEncoding, "train", lambda _, texts, size, s=seen: s.extend(texts) or word_tokenizer(eos_token="</s>")
        )
        write_lines(tmp_path / "a.jsonl", [f"{i:03d} " + "word " * 40 for i in range(count)])
        text_module(tmp_path / "a.jsonl", vocab_size=300 + count).prepare_data()
        assert 500 < sum(map(len, seen)) <= 1000
        assert len(seen) in sampled
        assert int(seen[-1][:3]) > 0.8 * count


def test_an_empty_file_and_a_column_without_text_are_named(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    assert "two different documents are needed" in refusal(tmp_path / "empty.txt")
    (tmp_path / "a.jsonl").write_text('{"text": 1}\n{"text": 2}\n')
    assert "the column 'text' should hold texts, and has 1; set data.text_column" in refusal(tmp_path / "a.jsonl")
    assert "has the columns text, and none of words" in refusal(tmp_path / "a.jsonl", text_column="words")


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


def tokens_module(path: Any, **options: Any) -> Any:
    return ready(tokens_data(path=path, **{"vocab_size": 1000, "block_size": 8, "val_fraction": 0.25} | options))


@pytest.mark.parametrize(("name", "dtype"), [("a.bin", "uint16"), ("a.bin", "uint32"), ("a.npy", "int64")])
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
    whole = tokens_module(tmp_path / name, **options).prepared
    assert (whole.train.num_documents, whole.train.num_tokens, whole.val.num_tokens) == (1, 87, 28)
    apart = tokens_module(tmp_path / name, val_path=tmp_path / name, **options)
    assert all_tokens(apart.prepared.train) == all_tokens(apart.prepared.val) == tokens.tolist()
    assert apart.tokenizer is None


@pytest.mark.parametrize(
    ("name", "array", "options", "message"),
    [
        ("a.bin", np.arange(100, dtype="<u2"), {"vocab_size": 50}, "has tokens from 0 to 99, and data.vocab_size=50"),
        ("a.bin", np.arange(9, dtype="<u4"), {"vocab_size": 70_000}, "needs tokens of four bytes; set data.dtype"),
        ("a.npy", np.zeros((2, 2), int), {}, "it has shape (2, 2) and type int64"),
    ],
)
def test_what_are_no_tokens_is_refused(tmp_path, name, array, options, message):
    (np.save if name.endswith("npy") else (lambda file, array: array.tofile(file)))(tmp_path / name, array)
    with pytest.raises(UserError) as error:
        tokens_module(tmp_path / name, **options)
    assert message in str(error.value)


@pytest.mark.slow
def test_mode_prepare_says_what_there_is_and_a_fit_finds_it(tmp_path):
    write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    overrides = ["data=text", f"data.path={tmp_path / 'a.jsonl'}", "data.vocab_size=400", "data.block_size=32"]
    prepared = train(tmp_path, "mode=prepare", *overrides)
    assert "a.jsonl: 59 documents, " in prepared.output
    finished = train(tmp_path, *overrides, *TINY_MODEL, "trainer.max_steps=2", "callbacks=measure", "hydra.run.dir=out")
    assert "encoding:" not in finished.output


@pytest.mark.slow
def test_of_two_ranks_one_prepares_and_both_train(tmp_path):
    overrides = ["data=text", f"data.path={text_folder(tmp_path)}", "data.vocab_size=400", "data.block_size=32"]
    distributed = ["trainer.accelerator=cpu", "trainer.devices=2", "strategy=ddp", "trainer.max_steps=2"]
    train(tmp_path, *overrides, *distributed, *TINY_MODEL, "callbacks=measure", "hydra.run.dir=out")
    assert summary(tmp_path / "out")["status"] == "completed"
