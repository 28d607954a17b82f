"""Texts without line ends, and words without end: encoded exactly, in a time that does not grow faster than they."""

import json
import random
import time
import tracemalloc

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import lit_fused.data.encoding as encoding_module
import lit_fused.data.file_source as file_source_module
import lit_fused.data.long_json as long_json_module
from lit_fused.data import FileSource, TextEncoding
from lit_fused.data.source import DocumentError
from lit_fused.data.tokenizer import tokenizer_digest, train_tokenizer

WORDS = [
    "the",
    "quick",
    "brown",
    "Füchse",
    "don't",
    "it's",
    "x=1;",
    "--",
    "...",
    "naïve",
    "漢字かな",
    "12345",
    "\t",
    "  ",
    "a",
]


def text_of(characters: int, words: list[str] = WORDS) -> str:
    generator, found, length = random.Random(1), [], 0
    while length < characters:
        found.append(generator.choice(words) + generator.choice([" ", " ", " ", "  ", "", ",", " - "]))
        length += len(found[-1])
    return "".join(found)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([text_of(20000)], 400)


def test_a_long_line_has_the_tokens_of_the_whole_text(tokenizer, monkeypatch):
    monkeypatch.setattr(encoding_module, "_PART", 50)
    text = text_of(30000)
    encoder = TextEncoding().encoder(tokenizer, 8)
    parts = [*encoding_module._between_words(text)]
    assert len(parts) > 300
    assert "".join(parts) == text
    (encoded,) = encoder([text])
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert np.array_equal(encoded.tokens, [*whole, tokenizer.eos_token_id])


@pytest.mark.parametrize("word", ["endless", "0123", "=-_", " \n"])
def test_a_word_without_end_is_cut_and_the_text_around_it_has_the_tokens_of_the_whole(tokenizer, monkeypatch, word):
    monkeypatch.setattr(encoding_module, "_PART", 50)
    before, after = text_of(2000), text_of(2000)
    text = f"{before}quick fox{word * 3000}the quick{after}"
    parts = [*encoding_module._between_words(text)]
    assert "".join(parts) == text
    assert max(map(len, parts)) < 500  # of text, where a gap between two words may be far
    (encoded,) = TextEncoding().encoder(tokenizer, 8)([text])
    assert tokenizer.decode(encoded.tokens[:-1]) == text
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    alike = tokenizer(before, add_special_tokens=False)["input_ids"][:-3]
    assert encoded.tokens[: len(alike)].tolist() == whole[: len(alike)] == alike


@pytest.mark.parametrize("entry", ["the quick", "it,", "brown)"])
def test_words_that_a_token_joins_with_what_follows_are_not_encoded_alone(tokenizer, entry):
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"].append({**state["added_tokens"][0], "id": len(tokenizer), "content": entry, "special": False})
    joining = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token="<|endoftext|>")
    text = f"{text_of(3000)} the quick brown) <|endoftext|> it, {text_of(3000)}"
    (encoded,) = TextEncoding().encoder(joining, 8)([text])
    expected = joining(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert len(tokenizer) in expected
    assert encoded.tokens[:-1].tolist() == expected


def test_a_tokenizer_that_does_not_divide_words_gets_the_slices_whole(monkeypatch):
    monkeypatch.setattr(encoding_module, "_PART", 10)
    backend = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(" words", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="?")
    (encoded,) = TextEncoding().encoder(tokenizer, 8)(["no piece of this is known to it " * 20])
    assert encoded.tokens.tolist() == [2, 1]


def test_training_on_parts_and_on_words_without_end_gives_the_same_tokenizer_for_normal_text(monkeypatch):
    text = text_of(30000)
    expected = tokenizer_digest(train_tokenizer([text], 400))
    monkeypatch.setattr(encoding_module, "_PART", 50)
    assert tokenizer_digest(TextEncoding().train([text], 400)) == expected


def test_a_million_letters_without_a_space_train_a_tokenizer_at_once():
    start = time.process_time()
    tokenizer = TextEncoding().train(["a" * 10**6, "b c" * 100], 1000)
    assert time.process_time() - start < 10
    assert tokenizer.decode(tokenizer("aaaa bbb")["input_ids"]) == "aaaa bbb"


@pytest.fixture
def small_parts(monkeypatch):
    """JSON lines of more than 200 bytes are cut into parts of about 64, and pieces have 256."""
    monkeypatch.setattr(file_source_module, "LONG_LINE", 200)
    monkeypatch.setattr(file_source_module, "DOCUMENT_BYTES", 64)
    monkeypatch.setattr(file_source_module, "_MIN_PIECE", 256)
    monkeypatch.setattr(long_json_module, "_LONG_STRING", 40)


def documents_of(file, **options):
    source = FileSource(file, **options)
    return [document for piece in source.pieces() for document in source.read(piece)]


ALPHABETS = ["ab \n", '\\"\n', "\\n", "日本語", 'a\U0001f600é"', "\x01\t\r/", "word word\n\n"]


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_long_json_lines_are_cut_into_parts_that_are_the_whole_text(tmp_path, small_parts, seed, ascii_only):
    generator = random.Random(seed)
    texts = ["".join(generator.choices(generator.choice(ALPHABETS), k=generator.randrange(900))) for _ in range(40)]
    records = [{"text": "old" * 30, "other": ["x" * 90, {"text": "y" * 90}], "text ": "z"} for _ in texts]
    lines = [
        json.dumps({**record, "id": i, "text": text}, ensure_ascii=ascii_only)
        for i, (record, text) in enumerate(zip(records, texts, strict=True))
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    documents = documents_of(tmp_path / "a.jsonl")
    assert max(len(str(document.content)) for document in documents) < 200
    found: dict[str, str] = {}
    for document in documents:
        found[document.where()] = found.get(document.where(), "") + str(document.content)
    assert found == {f"{tmp_path / 'a.jsonl'}:{number}": text for number, text in enumerate(texts, 1)}


def test_what_is_wrong_with_a_long_json_line_is_said_once_and_the_lines_around_it_are_read(tmp_path, small_parts):
    long = "x" * 600
    lines = [
        f'{{"text": "{long}',
        f'{{"body": "{long}"}}',
        f'{{"text": ["{long}"]}}',
        f'{{"text": "a", "b": "{long}"}}',
    ]
    lines += [f'["{long}"]', f'{{"text": "{long[:300]}\\q{long[:300]}"}}']
    lines += [" " * 600]  # is nothing
    ends = f'{{"text": "{long}\\\\'  # with the file, behind a backslash
    (tmp_path / "a.jsonl").write_text("\n".join(f'{line}\n{{"text": "between"}}\n' for line in lines) + ends)
    documents = documents_of(tmp_path / "a.jsonl")
    faults = [str(document.content) for document in documents if isinstance(document.content, DocumentError)]
    assert [fault[: fault.find(":") if ":" in fault else None] for fault in faults] == [
        "expected one JSON object, but the line cannot be parsed",
        "there is no column 'text'; those that are there",
        "expected text in 'text', got list",
        "expected one JSON object, got list",
        "expected one JSON object, but the line cannot be parsed",
        "expected one JSON object, but the line cannot be parsed",
    ]
    contents = [document.content for document in documents if isinstance(document.content, str)]
    assert contents.count("between") == 7
    assert contents.count("a") == 1
    assert "x" * 600 not in contents


def test_a_json_line_is_read_in_less_memory_than_it_has_bytes_and_by_every_piece(tmp_path):
    text = "a line of text\n" * 1_500_000
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": 1, "text": text, "source": "here"}))
    source, found = FileSource(tmp_path / "a.jsonl"), []
    tracemalloc.start()
    try:
        for piece in source.pieces():
            parts = [len(str(document.content)) for document in source.read(piece)]
            assert parts
            found += parts
        assert tracemalloc.get_traced_memory()[1] < len(text)
    finally:
        tracemalloc.stop()
    assert (sum(found), len(source.pieces())) == (len(text), 3)
