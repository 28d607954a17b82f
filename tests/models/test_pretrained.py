"""Pretrained models: where they are found, what is refused and how, and vocabularies that grow with the tokenizer."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import summary, text_folder, train
from composed import composed
from hydra.utils import instantiate
from lightning_helpers import quiet_trainer
from pretrained_folders import Words, pretrained, word_tokenizer
from safetensors.torch import load_file
from tiny_models import VOCABULARY, tiny_model
from tiny_seq2seq import tiny_seq2seq
from transformers import AutoModelForCausalLM

import lit_fused
from lit_fused import FusedCausalLMModule, UserError
from lit_fused.app.commands import MODES
from lit_fused.app.config import check_config
from lit_fused.export.__main__ import export
from lit_fused.models.load import is_deferred, materialize

PUBLISHED = {  # as the models' cards and checkpoints have it, tied weights counted once
    "llama_1b": 1_235_814_400,
    "gemma2_2b": 2_614_341_888,
    "gemma3_1b": 999_885_952,
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
}


def fit(folder: Path, model: Any, entries: int) -> FusedCausalLMModule:
    module = FusedCausalLMModule(model)
    quiet_trainer(folder, max_steps=1).fit(module, datamodule=Words(entries))
    return module


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_has_the_published_number_of_parameters(name):
    model = instantiate(composed(f"model={name}").model)
    assert is_deferred(model)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]


# Vocabularies.


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma2", "phi", "qwen3_moe", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vocabulary_grows_as_transformers_lets_it_grow(name, dtype, tmp_path):
    folder = pretrained(tmp_path / "theirs", name, dtype)
    late = lit_fused.from_pretrained(folder, dtype=dtype, vocab_size=103, pad_to_multiple_of=8)
    assert is_deferred(late)
    materialize(late)
    at_once = lit_fused.from_pretrained(folder, dtype=dtype, vocab_size=103, pad_to_multiple_of=8, at_once=True)
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    theirs.resize_token_embeddings(103, pad_to_multiple_of=8, mean_resizing=True)
    late.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=dtype)
    expected = dict(theirs.named_parameters(remove_duplicate=False))
    noise = 1e-2 if dtype == torch.bfloat16 else 1e-3  # transformers': 3e-5 standard deviations, rounded
    ours: Any
    for ours in (late, at_once, again):
        assert ours.config.vocab_size == 104
        assert ours.get_output_embeddings().weight.shape == (104, 32)
        tied = ours.get_input_embeddings().weight is ours.get_output_embeddings().weight
        assert tied == bool(theirs.config.tie_word_embeddings)
        for key, p in ours.named_parameters(remove_duplicate=False):
            scale = expected[key].abs().max()
            if len(p) == 104:
                assert torch.equal(p[:VOCABULARY], expected[key][:VOCABULARY]), key
                assert (p[VOCABULARY:] - expected[key][VOCABULARY:]).abs().max() <= noise * scale, key
            else:
                assert torch.equal(p, expected[key]), key


@pytest.mark.parametrize("name", ["bart", "bart_untied", "mbart", "pegasus", "led"])
def test_a_bias_along_the_columns_grows_with_its_vocabulary(name, tmp_path):
    theirs: Any = tiny_seq2seq(name)
    theirs.final_logits_bias.copy_(torch.linspace(-1, 1, VOCABULARY).sin() - 0.5)
    theirs.save_pretrained(tmp_path)
    late: Any = lit_fused.from_pretrained(tmp_path, vocab_size=103)
    assert is_deferred(late)
    materialize(late)
    both: list[Any] = [late, lit_fused.from_pretrained(tmp_path, vocab_size=103, at_once=True)]
    for ours in both:
        assert torch.equal(ours.final_logits_bias[:, :VOCABULARY], theirs.final_logits_bias)
        assert ours.final_logits_bias.shape == (1, 103)
        assert len(ours.get_output_embeddings().weight) == len(ours.get_input_embeddings().weight) == 103
        ids = torch.arange(90, 103)[None]
        loss = ours.eval()(input_ids=ids, labels=ids).loss
        assert lit_fused.fuse(ours)(input_ids=ids, labels=ids).loss.item() == pytest.approx(loss.item(), rel=2e-2)


def test_in_a_fit_the_vocabulary_grows_by_itself_to_that_of_the_tokenizer(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)  # The command takes it away.
    folder = pretrained(tmp_path / "model", "llama_tied")
    with caplog.at_level("INFO"):
        module = fit(tmp_path, lit_fused.from_pretrained(folder, pad_to_multiple_of=16), 112 + 3)
    assert "tokenizer has 115 entries, LlamaForCausalLM has 112: its vocabulary grows to 128" in caplog.text
    backbone: Any = module.backbone
    assert module.model.vocabulary == backbone.config.vocab_size == 128
    fresh = FusedCausalLMModule(lit_fused.from_pretrained(folder))
    fresh.make_room(module.state_dict())
    assert fresh.model.vocabulary == 128, "a checkpoint of the run has room"
    module.save_pretrained(tmp_path / "out")
    assert len(load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"]) == 128
    assert fit(tmp_path, lit_fused.from_pretrained(folder), VOCABULARY + 3).model.vocabulary == VOCABULARY + 3
    assert fit(tmp_path, lit_fused.from_pretrained(folder), VOCABULARY - 7).model.vocabulary == VOCABULARY


def test_a_tokenizer_with_other_numbers_than_the_models_own_is_announced(tmp_path, recwarn):
    folder = pretrained(tmp_path)
    fit(tmp_path, lit_fused.from_pretrained(folder), VOCABULARY + 2)
    assert not [w for w in recwarn if "tokenizer" in str(w.message)]
    word_tokenizer(VOCABULARY + 2).save_pretrained(folder)
    fit(tmp_path, lit_fused.from_pretrained(folder), VOCABULARY)
    message = next(str(w.message) for w in recwarn if "tokenizer" in str(w.message))
    assert re.search(r"not that of the pretrained LlamaForCausalLM: 2 of its 99 entries", message)


def test_a_vocabulary_does_not_shrink(tmp_path):
    with pytest.raises(UserError, match="has 97 entries in its vocabulary, and 90 were asked for"):
        lit_fused.from_pretrained(pretrained(tmp_path), vocab_size=90)


def test_adapters_ask_for_a_vocabulary_that_is_large_enough(tmp_path):
    peft = pytest.importorskip("peft")
    folder = pretrained(tmp_path / "model", "llama_tied")
    settings: Any = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"], "trainable_token_indices": [97, 98, 99]}

    def adapted(vocab_size: int | None) -> Any:
        base = lit_fused.from_pretrained(folder, vocab_size=vocab_size, at_once=True)
        return peft.get_peft_model(base, peft.LoraConfig(**(settings if vocab_size else {"task_type": "CAUSAL_LM"})))

    with pytest.raises(UserError, match=r"tokenizer has 100 entries .* only 97.*set vocab_size=100"):
        fit(tmp_path, adapted(None), 100)
    module = fit(tmp_path, adapted(100), 100)
    module.save_pretrained(tmp_path / "out")
    exported: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.config.vocab_size == len(exported.lm_head.weight) == 100
    before, after = load_file(folder / "model.safetensors")["model.embed_tokens.weight"], exported.lm_head.weight
    assert torch.equal(after[:97], before)
    assert not torch.isclose(after[97], after[98]).all(), "the new rows have not been trained"
    tokens = torch.arange(90, 100)[None]
    assert torch.allclose(exported(tokens).logits, module.backbone.eval()(tokens).logits, atol=1e-6)


@pytest.mark.slow
def test_two_ranks_of_fsdp2_let_it_grow_and_their_checkpoint_is_exported_and_resumed_by_one(tmp_path):
    folder = pretrained(tmp_path / "model", "llama_tied")
    overrides = ["model=pretrained", f"model.path={folder}", "data=text", f"data.path={text_folder(tmp_path)}"]
    overrides += ["data.tokenizer=null", "data.vocab_size=400", "data.block_size=32", "optimizer.lr=0"]
    overrides += ["trainer.accelerator=cpu", "callbacks.checkpoint.every_n_train_steps=2"]
    finished = train(
        tmp_path, *overrides, "strategy=fsdp2", "trainer.devices=2", "trainer.max_steps=2", "hydra.run.dir=out"
    )
    assert re.search("LlamaForCausalLM has 97: its vocabulary grows to 400", finished.plain)
    assert "the data's tokenizer is not that of the pretrained" in finished.plain
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "out" / "exported"))
    name = "model.embed_tokens.weight"
    assert torch.equal(after[name][:VOCABULARY], before[name])
    mean = before[name].mean(0).expand(400 - VOCABULARY, -1)
    assert torch.allclose(after[name][VOCABULARY:], mean, atol=1e-4)
    assert json.loads((tmp_path / "out" / "exported" / "config.json").read_text())["vocab_size"] == 400

    checkpoint = tmp_path / "out" / "checkpoints" / "last.ckpt"
    export(checkpoint, tmp_path / "again", tokenizer=False)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[key], after[key]) for key in after)
    single = ["data.batch_size=8", f"ckpt_path={checkpoint}", "trainer.max_steps=3", "hydra.run.dir=resumed"]
    train(tmp_path, *overrides, *single)
    assert summary(tmp_path / "resumed")["steps"] == 3


# The tests below show where a model is looked for.


def test_what_is_no_models_folder_is_refused_by_its_name(tmp_path):
    (tmp_path / "empty").mkdir()
    endless = {"model_type": "llama", "num_hidden_layers": 10_000_000}
    for name, config in (
        ("unknown", {"model_type": "nosuch"}),
        ("no_head", {"model_type": "clip"}),
        ("endless", endless),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    for name, message in (
        ("nowhere", r"nowhere cannot be loaded: "),
        ("empty", r"empty cannot be loaded: "),
        ("unknown", r"unknown cannot be loaded: .*`nosuch`"),
        ("no_head", r"auto classes have no language model for a CLIPConfig"),
        ("endless", r"endless cannot be loaded: num_hidden_layers of its config.json is 10000000"),
    ):
        with pytest.raises(UserError, match=message):
            lit_fused.from_pretrained(tmp_path / name)


def test_pickled_weights_are_loaded_as_transformers_loads_them(tmp_path):
    folder = pretrained(tmp_path)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    model: Any = lit_fused.from_pretrained(folder)
    materialize(model)
    assert torch.equal(model.lm_head.weight, tiny_model("llama").lm_head.weight)


def test_the_path_has_to_be_given():
    with pytest.raises(UserError, match=r"model.path: has no value; give one with model.path=\.\.\."):
        check_config(composed("model=pretrained"), MODES)


@pytest.mark.slow
def test_adapters_around_a_pretrained_model_train_and_export_from_the_command(tmp_path):
    folder = pretrained(tmp_path / "model", "llama_tied")
    train(
        tmp_path,
        *("model=lora", "model@model.model=pretrained", f"model.model.path={folder}", "data=synthetic"),
        *("data.vocab_size=97", "data.block_size=32", "trainer.max_steps=2", "hydra.run.dir=out"),
        "callbacks.checkpoint.every_n_train_steps=2",
    )
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "out" / "exported"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "_proj" in name}
