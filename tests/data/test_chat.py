"""Conversations: the assistant's tokens and no others are learned, whatever the template, or they are left out."""

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from chat_templates import (
    CHATML_MARKED,
    GEMMA,
    LLAMA3,
    LLAMA3_MARKED,
    PLAIN,
    QWEN3,
    TEMPLATES,
    THOUGHTS_CONTINUED,
    THOUGHTS_OPENED,
    make_tokenizer,
)

from lit_fused.data import ChatEncoding
from lit_fused.data.chat_template import CHATML, with_chat_template
from lit_fused.data.encoding import Encoded
from lit_fused.data.tokenizer import train_tokenizer
from lit_fused.errors import UserError

ANSWERS = ["I am well", "thank you! 🎉", "日本", "a  b\n\nc ", "\n42", " so", "0 "]


def says(role, content, **more):
    return {"role": role, "content": content, **more}


def loss_mask_of(encoded: Encoded) -> npt.NDArray[np.bool_]:
    assert encoded.loss_mask is not None
    return encoded.loss_mask


def templated(tokenizer, messages, **options) -> dict[str, list[int]]:
    """Return what transformers makes of the conversation."""
    return tokenizer.apply_chat_template(messages, return_dict=True, **options)


def documents(tokenizer, messages, block_size=10_000, **options):
    """[(tokens, loss_mask)] of a conversation's documents."""
    (encoded,) = ChatEncoding(**options).encoder(tokenizer, block_size)([{"messages": messages}])
    ends = (len(encoded.tokens),) if encoded.ends is None else encoded.ends
    starts = (0, *ends[:-1])
    loss_mask = loss_mask_of(encoded)
    return [(encoded.tokens[a:b], loss_mask[a:b]) for a, b in zip(starts, ends, strict=True)]


def why_left_out(tokenizer, messages, **record):
    (encoded,) = ChatEncoding().encoder(tokenizer, 10_000)([{"messages": messages, **record}])
    assert not len(encoded.tokens)
    (note,) = encoded.notes
    return note


def runs(tokenizer, tokens, loss_mask):
    """The text of each unbroken run of wanted tokens."""
    groups = itertools.groupby(zip(tokens, loss_mask, strict=True), key=lambda pair: bool(pair[1]))
    return [tokenizer.decode([token for token, _ in group]) for is_wanted, group in groups if is_wanted]


# --- which tokens are the assistant's ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bytes", "trimmed"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_wanted_tokens_say_exactly_what_the_assistant_says(name, kind):
    template, end, takes_system = TEMPLATES[name]
    tokenizer = make_tokenizer(template, kind)
    written = {
        **dict.fromkeys(("llama3", "llama3_marked", "gemma"), str.strip),
        "mistral": lambda text: " " + text,
        "phi3": str.lstrip,  # <|assistant|> swallows white space behind it
    }.get(name, str)
    for first, second in itertools.product(ANSWERS, ANSWERS):
        messages = [says("user", "How are "), says("assistant", first), says("user", first), says("assistant", second)]
        messages = [says("system", "Be brief")] * takes_system + messages
        ((tokens, loss_mask),) = documents(tokenizer, messages)
        assert runs(tokenizer, tokens, loss_mask) == [written(first) + end, written(second) + end]
        assert tokens.tolist() == templated(tokenizer, messages)["input_ids"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_stands_before_an_answer_is_the_prompt_that_a_model_is_given(name):
    template, _, _ = TEMPLATES[name]
    tokenizer = make_tokenizer(template)
    prompt = [says("user", "How are you?"), says("assistant", "I am well"), says("user", "42?")]
    ((tokens, loss_mask),) = documents(tokenizer, [*prompt, says("assistant", "thank you!")])
    given = templated(tokenizer, prompt, add_generation_prompt=True)["input_ids"]
    assert tokens[: len(given)].tolist() == given
    assert loss_mask[len(given) :].sum() == loss_mask[len(given) : np.flatnonzero(loss_mask)[-1] + 1].size
    assert np.flatnonzero(loss_mask)[-1] > len(given)


def test_the_templates_own_marks_decide_and_the_end_of_turn_is_learned_with_them():
    for template in (CHATML_MARKED, LLAMA3_MARKED):
        tokenizer = make_tokenizer(template)
        messages = [
            says("user", "How"),
            says("assistant", "I am"),
            says("user", "well"),
            says("assistant", "thank you!"),
        ]
        ((tokens, loss_mask),) = documents(tokenizer, messages)
        theirs = templated(tokenizer, messages, return_assistant_tokens_mask=True)
        assert tokens.tolist() == theirs["input_ids"]
        assert loss_mask.tolist() == [bool(mark) for mark in theirs["assistant_masks"]]


# --- templates that rewrite earlier answers ------------------------------------------------------------------------


def test_a_template_that_drops_earlier_thoughts_gives_one_document_per_question():
    tokenizer = make_tokenizer(QWEN3)
    messages = [
        says("user", "12 + 30?"),
        says("assistant", "42", reasoning_content="the fox"),
        says("user", "well?"),
        says("assistant", "<think>\nthe dog\n</think>\n\nthank you!"),
    ]
    (first, second) = documents(tokenizer, messages)
    assert runs(tokenizer, *first) == ["<think>\nthe fox\n</think>\n\n42<|im_end|>"]
    assert runs(tokenizer, *second) == ["<think>\nthe dog\n</think>\n\nthank you!<|im_end|>"]
    assert "the fox" not in tokenizer.decode(second[0])  # as a model sees it when it answers the second question
    for (tokens, loss_mask), prompt in zip((first, second), (messages[:1], messages[:3]), strict=True):
        given = templated(tokenizer, prompt, add_generation_prompt=True)["input_ids"]
        assert tokens[: len(given)].tolist() == given
        assert int(np.flatnonzero(loss_mask)[0]) == len(given)


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (THOUGHTS_CONTINUED, "\n</think>\n\n{}<|im_end|>"),  # a token holds the prompt's line break and the answer's
        (LLAMA3, "{}<|eot_id|>"),  # the prompt's two line breaks are one token at its end, two before a letter
    ],
)
def test_where_an_answer_changes_its_prompts_tokens_they_are_encoded_apart(template, written):
    tokenizer = make_tokenizer(template, "lines")
    assert len(tokenizer("\n\n")["input_ids"]) == 1
    messages = [says("user", "12"), says("assistant", "fox"), says("user", "30"), says("assistant", "dog")]
    first, second = documents(tokenizer, messages)
    for (tokens, loss_mask), count, answer in ((first, 1, "fox"), (second, 3, "dog")):
        given = templated(tokenizer, messages[:count], add_generation_prompt=True)["input_ids"]
        assert tokens[: len(given)].tolist() == given
        assert loss_mask.tolist() == [False] * len(given) + [True] * (len(tokens) - len(given))
        assert tokenizer.decode(tokens[loss_mask]) == written.format(answer)
    (encoded,) = ChatEncoding().encoder(tokenizer, 100)([{"messages": messages}])
    assert encoded.notes == ("divided: prompts are encoded otherwise with an answer behind them",)


def test_an_answer_that_the_template_does_not_write_behind_its_prompt_is_not_learned():
    messages = [says("user", "12"), says("assistant", "<think>a</think>fox")]
    note = why_left_out(make_tokenizer(THOUGHTS_OPENED), messages)
    assert note.startswith("left out: the chat template does not write an answer behind its prompt; give it")


# --- records -------------------------------------------------------------------------------------------------------


USER = says("user", "a")


def test_what_the_template_refuses_is_left_out_in_the_templates_own_words():
    note = why_left_out(make_tokenizer(GEMMA), [USER, USER, says("assistant", "b")])
    assert note.startswith("left out: the chat template refuses it: Conversation roles must alternate")


def test_a_stranger_s_template_runs_no_code():
    escape = "{{ messages.__class__.__base__.__subclasses__() }}"
    note = why_left_out(make_tokenizer(escape), [USER, says("assistant", "b")])
    assert note.startswith("left out: the chat template refuses it: access to attribute '__class__'")


def test_a_message_that_spells_out_a_special_token_is_left_out():
    note = why_left_out(make_tokenizer(CHATML), [says("user", "<|im_end|> b"), says("assistant", "c")])
    assert note.startswith("left out: a message spells out the special token <|im_end|>")


# --- length --------------------------------------------------------------------------------------------------------


# --- tokenizers ----------------------------------------------------------------------------------------------------


def test_a_tokenizer_without_a_template_is_refused_unless_one_is_given(tmp_path):
    with pytest.raises(UserError, match="has no chat template; set data.chat_template"):
        ChatEncoding().encoder(make_tokenizer(), 100)
    chatml = ChatEncoding(chat_template="chatml").encoder(make_tokenizer(), 100).tokenizer
    assert chatml.chat_template == CHATML
    assert chatml.eos_token == "<|im_end|>"
    (tmp_path / "mine.jinja").write_text(PLAIN)
    for mine in (tmp_path / "mine.jinja", PLAIN):
        encoding = ChatEncoding(chat_template=mine)
        assert encoding.chat_template == encoding.encoder(make_tokenizer(CHATML), 100).tokenizer.chat_template == PLAIN
    with pytest.raises(UserError, match="must be chatml or a file.*no.jinja"):
        ChatEncoding(chat_template=tmp_path / "no.jinja")


def test_chatml_adds_its_tokens_to_a_tokenizer_without_them_as_tokens_that_no_text_becomes():
    plain = train_tokenizer(["a text"], 260)
    entries = len(plain)
    tokenizer = with_chat_template(plain, CHATML)
    assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [entries, entries + 1]
    assert tokenizer.eos_token_id == entries + 1
    ((tokens, loss_mask),) = documents(tokenizer, [says("user", "12"), says("assistant", "fox")])
    assert runs(tokenizer, tokens, loss_mask) == ["fox<|im_end|>"]
    assert "special token <|im_end|>" in why_left_out(tokenizer, [says("user", "<|im_end|>"), says("assistant", "fox")])


def test_a_template_without_any_end_of_turn_token_learns_what_ends_its_turns():
    tokenizer = make_tokenizer(PLAIN)
    messages = [says("user", "12"), says("assistant", "fox"), says("user", "30"), says("assistant", "dog")]
    ((tokens, loss_mask),) = documents(tokenizer, messages)
    assert runs(tokenizer, tokens, loss_mask) == [" fox\n\n", " dog\n\n"]
    (encoded,) = ChatEncoding().encoder(tokenizer, 100)([{"messages": messages}])
    assert encoded.notes == ("no token ends the answers: a model does not learn to stop",)
