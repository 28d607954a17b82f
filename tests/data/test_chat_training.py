"""Chat files through the preparation into a run: what is bad is named by its line, and only answers are learned."""

import json
from typing import Any

import pytest
import torch
from chat_templates import CHATML_UNMARKED, make_tokenizer
from commands import summary, train
from data_modules import chat_data, ready
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from lit_fused.data.chat_template import CHATML
from lit_fused.data.tokenizer import train_tokenizer
from lit_fused.errors import UserError


def asked(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


CHAT = [asked(f"{a} + {b}?", f"It is {a + b}.") for a in range(8) for b in range(8)]


@pytest.fixture
def tokenizer(tmp_path):
    make_tokenizer(CHATML_UNMARKED).save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def write(path, records):
    """A .jsonl file of records, and of strings as they are."""
    path.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return path


def prepared(path, tokenizer, kind=chat_data, **options):
    return ready(kind(path=path, tokenizer=tokenizer, **{"block_size": 64, "batch_size": 4, **options}))


# --- bad input -----------------------------------------------------------------------------------------------------


def test_what_is_cut_and_left_out_is_counted_and_said(tmp_path, tokenizer, caplog):
    long = asked("a", "It is long. " * 30)
    records = [*CHAT, long, long | {"id": 2}, {"messages": [{"role": "user", "content": "a"}]}, asked("b " * 50, "c")]
    with caplog.at_level("INFO"):
        data = prepared(write(tmp_path / "chat.jsonl", records), tokenizer).prepared
    assert "left out: the assistant says nothing: 1" in caplog.text  # also where a run prepares by the way
    assert "cut to 64 tokens: 2" in data.report
    assert "left out: no answer begins within data.block_size=64 tokens: 1" in data.report
    assert data.train.num_documents + data.val.num_documents == len(CHAT) + 2


# --- tokens and batches --------------------------------------------------------------------------------------------


def test_batches_hold_whole_conversations_and_labels_only_where_the_assistant_speaks(tmp_path, tokenizer):
    module = prepared(write(tmp_path / "chat.jsonl", CHAT), tokenizer)
    assert module.tokenizer is not None
    said = ""
    for batch in module.train_dataloader():
        assert torch.equal(batch["labels"][batch["labels"] != -100], batch["input_ids"][batch["labels"] != -100])
        assert (batch["input_ids"][batch["position_ids"] == 0] == 2).sum() > 4  # each row begins several conversations
        said += str(module.tokenizer.decode(batch["labels"][batch["labels"] != -100]))
    answers = said.removesuffix("<|im_end|>").split("<|im_end|>")
    assert len(answers) > 30
    assert set(answers) <= {record["messages"][1]["content"] for record in CHAT}


def test_a_tokenizer_trained_on_the_conversations_has_chatml(tmp_path):
    module = prepared(write(tmp_path / "chat.jsonl", CHAT), None, vocab_size=300)
    assert module.tokenizer is not None
    assert module.tokenizer.chat_template == CHATML
    tokens, loss_mask = module.prepared.train.read(0, int(module.prepared.train.ends[0]))
    assert str(module.tokenizer.decode(tokens[loss_mask])).endswith(".<|im_end|>")
    with pytest.raises(UserError, match="data.vocab_size must be a whole number, 260 or more"):
        prepared(tmp_path / "chat.jsonl", None, vocab_size=259)


# --- learning ------------------------------------------------------------------------------------------------------


def tiny_llama(vocab_size):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.slow
def test_a_pretrained_folder_of_a_model_that_never_chatted_is_trained_on_a_chat_file_by_the_command(tmp_path):
    base = train_tokenizer(["what is said, and what is answered"], 280)
    base.save_pretrained(tmp_path / "base")
    tiny_llama(len(base)).save_pretrained(tmp_path / "base")
    write(tmp_path / "chat.jsonl", CHAT)
    done = train(
        tmp_path,
        *("model=pretrained", f"model.path={tmp_path / 'base'}", "data.chat_template=chatml"),
        *("data=chat", f"data.path={tmp_path / 'chat.jsonl'}", "data.block_size=64", "trainer.max_steps=5"),
        *("hydra.run.dir=run", "trainer.accelerator=cpu"),
    )
    assert "64 documents" not in done.output  # some are held out
    assert "val/loss" in summary(tmp_path / "run")["metrics"]
    exported = AutoTokenizer.from_pretrained(tmp_path / "run" / "exported")
    assert exported.chat_template
    assert len(exported) == len(base) + 2
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "exported")
    assert model.get_input_embeddings().weight.shape[0] == len(base) + 2
    assert exported.eos_token_id in model.generation_config.eos_token_id
