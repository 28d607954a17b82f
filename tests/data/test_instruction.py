"""Prompts and completions: the prompt's tokens are those a model is given, loss is on the completion and its end."""

import numpy as np
import pytest
from chat_templates import make_tokenizer

from lit_fused.data import InstructionEncoding
from lit_fused.errors import UserError


def pair(prompt, completion):
    return {"prompt": prompt, "completion": completion}


def encode(tokenizer, record, block_size=1000, **options):
    (encoded,) = InstructionEncoding(**options).encoder(tokenizer, block_size)([record])
    return encoded


BOUNDARIES = [
    ("12 + 30 = ", "42"),
    ("12 + 30 =", " 42"),
    ("How are", " you?\n"),
    ("fox\n", "\ndog"),
    ("日", "本"),
    ("", "fox"),
]


@pytest.mark.parametrize("kind", ["bytes", "trimmed"])
@pytest.mark.parametrize(("prompt", "completion"), [*BOUNDARIES, ("the qu", "ick"), ("a ", " b"), ("\n", "\n\n")])
def test_prompt_tokens_are_those_of_the_prompt_alone_and_the_rest_is_the_completion(prompt, completion, kind):
    tokenizer = make_tokenizer(kind=kind)
    encoded = encode(tokenizer, pair(prompt, completion if completion.strip() else completion + "x"))
    given = tokenizer(prompt)["input_ids"]
    completion = completion if completion.strip() else completion + "x"
    assert encoded.tokens[: len(given)].tolist() == given
    assert encoded.loss_mask is not None
    assert encoded.loss_mask.tolist() == [False] * len(given) + [True] * (len(encoded.tokens) - len(given))
    assert tokenizer.decode(encoded.tokens[len(given) :]) == completion + "</s>"
    assert (encoded.tokens == tokenizer.eos_token_id).sum() == 1


def test_a_sentencepiece_tokenizer_puts_no_space_where_there_is_none():
    tokenizer = make_tokenizer(kind="metaspace")
    spaced = encode(tokenizer, pair("How are", " you?"))
    assert tokenizer.decode(spaced.tokens) == "How are you?</s>"
    left_out = encode(tokenizer, pair("How ", "are you"))
    assert not len(left_out.tokens)
    assert left_out.notes[0].startswith("left out: the prompt's end and the completion's beginning share a token")


def test_alpaca_records_with_and_without_input():
    tokenizer = make_tokenizer()
    record = {"instruction": "Add.", "input": "12 + 30", "output": "42", "text": "of no use"}
    text = str(tokenizer.decode(encode(tokenizer, record).tokens))
    assert text.startswith("Below is an instruction that describes a task, paired with an input")
    assert text.endswith("### Instruction:\nAdd.\n\n### Input:\n12 + 30\n\n### Response:\n42</s>")
    for without in ({"input": ""}, {"input": None}):
        text = str(tokenizer.decode(encode(tokenizer, record | without).tokens))
        assert "paired with" not in text
        assert text.endswith("### Instruction:\nAdd.\n\n### Response:\n42</s>")


def test_columns_and_words_of_ones_own():
    tokenizer = make_tokenizer()
    record = {"question": "{How} are you?", "answer": "well", "name": "fox"}
    encoded = encode(tokenizer, record, prompt="question", completion="answer")
    assert tokenizer.decode(encoded.tokens) == "{How} are you?well</s>"
    encoded = encode(tokenizer, record, prompt="To {name}: {question}\nA:", completion="answer")
    assert tokenizer.decode(encoded.tokens) == "To fox: {How} are you?\nA:well</s>"
    assert tokenizer.decode(encoded.tokens[encoded.loss_mask]) == "well</s>"


def test_long_documents_are_cut_or_skipped_and_empty_completions_left_out():
    tokenizer = make_tokenizer()
    whole = encode(tokenizer, pair("12", " 30 42"))
    assert whole.loss_mask is not None
    prompt = int(np.flatnonzero(whole.loss_mask)[0])
    cut = encode(tokenizer, pair("12", " 30 42"), prompt + 1)
    assert cut.tokens.tolist() == whole.tokens[: prompt + 1].tolist()
    assert cut.notes == (f"cut to {prompt + 1} tokens",)
    for block_size, options, note in (
        (prompt, {}, f"left out: no answer begins within data.block_size={prompt} tokens"),
        (3, {"too_long": "skip"}, "left out: longer than data.block_size=3"),
    ):
        left_out = encode(tokenizer, pair("12", " 30 42"), block_size, **options)
        assert len(left_out.tokens) == 0
        assert left_out.notes == (note,)
    empty = encode(tokenizer, pair("12", " \n"))
    assert len(empty.tokens) == 0
    assert empty.notes == ("left out: the completion is empty",)


def test_a_tokenizer_without_an_end_is_refused_and_one_without_padding_is_not():
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    assert len(encode(tokenizer, pair("a", "b")).tokens)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match=r"has no end-of-text token, which ends every completion; give it one"):
        encode(tokenizer, pair("a", "b"))
