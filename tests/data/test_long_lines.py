"""Texts without line ends, and words without end: encoded exactly, in a time that does not grow faster than they."""

import json
import random
import time

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import lit_fused.data.encoding as encoding_module
from lit_fused.data import TextEncoding
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


@pytest.mark.parametrize("known", [5, 2**16])
def test_a_long_line_has_the_tokens_of_the_whole_text(tokenizer, monkeypatch, known):
    monkeypatch.setattr(encoding_module, "_PART", 50)
    monkeypatch.setattr(encoding_module, "_KNOWN_WORDS", known)
    text = text_of(30000)
    encoder = TextEncoding().encoder(tokenizer, 8)
    parts = [*encoding_module._between_words(text)]
    assert len(parts) > 300
    assert "".join(parts) == text
    (encoded,) = encoder([text])
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert np.array_equal(encoded.tokens, [*whole, tokenizer.eos_token_id])
    assert encoder._encode == encoder._by_words
    assert len(encoder._words) <= known


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
