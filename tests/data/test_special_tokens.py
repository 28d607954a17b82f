"""Test that a text has one beginning-of-text and one end-of-text token, also where it spells them out itself."""

import json
from pathlib import Path
from typing import Any

import pytest
from pretrained_folders import word_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lit_fused.data import (
    ChatEncoding,
    InstructionEncoding,
    PairEncoding,
    PreferenceEncoding,
    RolloutDataModule,
    TextEncoding,
)
from lit_fused.models.generation import encode_prompt

BOS, EOS = "<|begin_of_text|>", "</s>"
TEMPLATES = {"BOS": f"{BOS} $A", "BOS and EOS": f"{BOS} $A {EOS}", "EOS": f"$A {EOS}", "nothing": None}
CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


@pytest.fixture(params=TEMPLATES)
def tokenizer(request) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer as Llama's, that adds special tokens itself in one of four ways."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(["the quick brown fox"] * 3, trainer)
    if template := TEMPLATES[request.param]:
        inner.post_processor = processors.TemplateProcessing(template, special_tokens=[(BOS, 0), (EOS, 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=BOS, eos_token=EOS, chat_template=CHAT)


def adds_bos(tokenizer: PreTrainedTokenizerFast) -> bool:
    return tokenizer("a")["input_ids"][0] == 0


def text_of(encoding: Any, document: Any, tokenizer: PreTrainedTokenizerFast) -> tuple[str, str]:
    """Return the text of a document's tokens, and of those that are learned."""
    (encoded,) = encoding.encoder(tokenizer, 200)([document])
    learned = encoded.tokens if encoded.loss_mask is None else encoded.tokens[encoded.loss_mask]
    return str(tokenizer.decode(encoded.tokens)), str(tokenizer.decode(learned))


@pytest.mark.parametrize("end", ["", EOS])
@pytest.mark.parametrize("begin", ["", BOS])
def test_a_prompt_and_its_completion_have_one_of_each(begin, end, tokenizer):
    record = {"prompt": f"{begin}[INST] the fox[/INST]", "completion": f" brown{end}"}
    first = BOS if begin or adds_bos(tokenizer) else ""
    expected = f"{first}[INST] the fox[/INST] brown{EOS}", f" brown{EOS}"
    assert text_of(InstructionEncoding(), record, tokenizer) == expected


@pytest.mark.parametrize("end", ["", EOS])
def test_preferences_of_texts_have_one_of_each(end, tokenizer):
    record = {"prompt": f"{BOS}the", "chosen": f" fox{end}", "rejected": f" brown{end}"}
    (encoded,) = PreferenceEncoding().encoder(tokenizer, 200)([record])
    middle = encoded.ends[0]
    assert tokenizer.decode(encoded.tokens[:middle]) == f"{BOS}the fox{EOS}"
    assert tokenizer.decode(encoded.tokens[middle:]) == f"{BOS}the brown{EOS}"


def test_a_conversation_has_the_tokens_of_its_template_alone(tokenizer):
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": " fox"}]
    assert text_of(ChatEncoding(), {"messages": messages}, tokenizer)[0] == f"{BOS}[user]the[assistant] fox{EOS}"
    assert tokenizer.decode(encode_prompt("the", tokenizer, chat=True)[0]) == f"{BOS}[user]the[assistant]"


def test_a_prompt_to_continue_has_one_beginning_and_no_end_but_one_that_it_spells_out(tokenizer):
    assert tokenizer.decode(encode_prompt(f"{BOS}the fox", tokenizer, chat=False)[0]) == f"{BOS}the fox"
    whole = tokenizer.decode(tokenizer("the fox")["input_ids"])  # as the encoder of an encoder-decoder reads it
    assert tokenizer.decode(encode_prompt("the fox", tokenizer, chat=False, is_source=True)[0]) == whole
    assert tokenizer.decode(encode_prompt("", tokenizer, chat=False)[0]) == BOS
    assert tokenizer.decode(encode_prompt(f"the{EOS}", tokenizer, chat=False)[0]).count(EOS) == 1
    assert tokenizer.decode(encode_prompt("the fox", tokenizer, chat=False)[0]).count(BOS) == adds_bos(tokenizer)


@pytest.mark.parametrize("end", ["", EOS])
def test_rollouts_have_one_of_each(end, tokenizer, tmp_path: Path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    record = {"prompt": f"{BOS}a b{EOS} c{EOS}", "completion": f" fox{end}", "reward": 1.0}
    (tmp_path / "r.jsonl").write_text(json.dumps(record))
    data = RolloutDataModule(tmp_path / "r.jsonl", tokenizer=tmp_path / "tokenizer")
    data.setup()
    assert tokenizer.decode(data.rows["train"][0]["input_ids"]) == f"{BOS}a b{EOS} c{EOS} fox{EOS}"


@pytest.mark.parametrize("text", ["the fox", f"{BOS}the fox{EOS}", f"the {EOS} fox"])
def test_a_document_of_text_has_one_of_each_and_what_it_spells_out_is_text(text, tokenizer):
    (encoded,) = TextEncoding().encoder(tokenizer, 200)([text])
    tokens = encoded.tokens.tolist()
    assert tokens.count(0) == (1 if adds_bos(tokenizer) else 0)
    assert (tokens.count(1), tokens[-1]) == (1, 1)
    middle = tokens[1:-1] if adds_bos(tokenizer) else tokens[:-1]
    assert tokenizer.decode(middle) == text


def test_a_tokenizer_of_whole_words_that_finds_special_tokens_in_a_text_adds_no_second_ones():
    tokenizer = word_tokenizer(9)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [("<bos>", 1), ("<eos>", 2)]
    backend.post_processor = processors.TemplateProcessing("<bos> $A <eos>", special_tokens=special)
    for text in ("<bos> w3 w4 <eos>", "w3 w4"):
        pair = {"source": text, "target": text}
        both = " ".join(["<bos> w3 w4 <eos>"] * 2), "<bos> w3 w4 <eos>"
        assert text_of(PairEncoding(), pair, tokenizer) == both
