"""Samples begin as held-out documents of the run's own data do, unless the user gives a prompt."""

import json
from pathlib import Path
from typing import Any

from data_modules import chat_data, pairs_data, ready, text_data, tokens_data
from lightning_helpers import loader, quiet_trainer, ragged_batches, tiny_llama
from transformers import GPT2Config, GPT2LMHeadModel
from word_data import Words, tiny_t5

from lit_fused import FusedCausalLMModule, FusedSeq2SeqLMModule
from lit_fused.callbacks import SampleText
from lit_fused.data import SyntheticDataModule

NAMES = ["Amina", "Baraka", "Chausiku", "Daudi", "Eshe", "Faraji", "Goma", "Hawa", "Imani", "Jabari"] * 3
SIZES: dict[str, Any] = {"vocab_size": 300, "block_size": 256, "batch_size": 2, "val_fraction": 0.3}


def written(folder: Path, records: list[Any]) -> Path:
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / "data.jsonl"


def samples(folder: Path, data: Any, prompt: str | None = None, module: Any = None) -> dict[str, str]:
    sample = SampleText(prompt, max_new_tokens=6)
    if module is None:
        data.prepare_data()
        data.setup()
        module = FusedCausalLMModule(tiny_llama(vocab_size=data.vocab_size))
    quiet_trainer(folder, max_steps=1, limit_val_batches=0, callbacks=[sample]).fit(module, data)
    return sample.samples


def held_out(data: Any) -> list[str]:
    store, texts, start = data.prepared.val, [], 0
    for end in store.ends.tolist():
        texts.append(data.tokenizer.decode(store.read(start, end)[0], skip_special_tokens=True))
        start = end
    return texts


def test_a_sample_of_a_text_continues_the_beginning_of_a_held_out_document(tmp_path):
    records = [{"text": f"{name} number {i} lives in a house by the sea." * 2} for i, name in enumerate(NAMES)]
    data: Any = text_data(path=written(tmp_path, records), cache_dir=tmp_path, **SIZES)
    found = samples(tmp_path, data)
    assert found.keys() == {"before training", "after training"}
    begun = data.tokenizer.decode(data.held_out_prompt()[0])
    assert all(text.startswith(begun) for text in found.values())
    assert any(text.startswith(begun) for text in held_out(data))
    assert "def " not in begun
    assert data.held_out_prompt().shape == (1, 16)
    assert samples(tmp_path, data, "My own")["after training"].startswith("My own")


def test_a_sample_of_a_chat_answers_the_first_users_turn_of_a_held_out_conversation(tmp_path):
    turns = [[f"Who is {name} {i}?", f"{name} {i}.", "And who else?", "Nobody."] for i, name in enumerate(NAMES)]
    roles = ("user", "assistant", "user", "assistant")
    records = [{"messages": [{"role": r, "content": c} for r, c in zip(roles, turn, strict=True)]} for turn in turns]
    data: Any = chat_data(path=written(tmp_path, records), cache_dir=tmp_path, **SIZES)
    found = samples(tmp_path, data)["before training"]
    questions = [turn[0] for turn in turns if any(turn[0] in text for text in held_out(data))]
    assert any(f"{question}\nassistant\n" in found for question in questions)
    assert "And who else?" not in found


def test_a_sample_of_pairs_shows_a_held_out_source_and_the_answer_to_it(tmp_path):
    records = [{"source": f"{name} {i} goes home", "target": f"home goes {i} {name}"} for i, name in enumerate(NAMES)]
    data: Any = ready(pairs_data(path=written(tmp_path, records), cache_dir=tmp_path, **SIZES))
    found = samples(tmp_path, data, module=FusedSeq2SeqLMModule(tiny_t5(vocab_size=data.vocab_size)))["before training"]
    source, _, answer = found.partition("\n\n")
    assert source in [record["source"] for record in records]
    assert any(text.startswith(source) for text in held_out(data))
    assert answer != source


def test_without_held_out_documents_and_a_tokenizer_nothing_is_sampled(tmp_path):
    (tmp_path / "tokens.bin").write_bytes(bytes([7, 1] * 2000))
    tokens = tokens_data(path=tmp_path / "tokens.bin", cache_dir=tmp_path, **dict(SIZES, block_size=8))
    sizes: dict[str, Any] = {"vocab_size": 300, "block_size": 8, "batch_size": 2}
    synthetic = SyntheticDataModule(**sizes, num_train_batches=2, num_val_batches=1)
    for data in (tokens, synthetic, Words(), loader(ragged_batches(2))):
        assert samples(tmp_path, data, module=FusedCausalLMModule(tiny_llama(vocab_size=300))) == {}


def test_a_sample_ends_with_the_models_positions(tmp_path):
    records = [{"text": f"{name} number {i} lives in a house by the sea." * 2} for i, name in enumerate(NAMES)]
    options: dict[str, Any] = dict(SIZES, block_size=8)
    data: Any = ready(text_data(path=written(tmp_path, records), cache_dir=tmp_path, **options))
    sizes: dict[str, Any] = {"n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=data.vocab_size, **sizes))
    sample = samples(tmp_path, data, module=FusedCausalLMModule(model))["before training"]
    assert sample.startswith(data.tokenizer.decode(data.held_out_prompt()[0]))
