"""``mode=generate``, and what is exported for it: which weights, which tokenizer, which token ends a text."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from commands import TINY_MODEL, text_folder, train
from composed import composed
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_helpers import loader, quiet_trainer, ragged_batches
from omegaconf import DictConfig
from pretrained_folders import Words, pretrained, word_tokenizer
from tiny_models import tiny_batch, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import lit_fused
from lit_fused import FusedCausalLMModule, UserError
from lit_fused.app.commands.generating import generate
from lit_fused.app.overrides import with_run
from lit_fused.app.restore import tokenizer_of
from lit_fused.callbacks import ExportPretrained, WeightAverage
from lit_fused.models.generation import continuation, encode_prompt, generation_config
from lit_fused.parallel.checkpoint import read_weights

PROMPT = "3 times 7 is"
GREEDY = ["mode=generate", f'prompt="{PROMPT}"', "generate.temperature=0", "generate.max_new_tokens=12"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder that a run was started in: a model from its configuration, its average, the best checkpoint."""
    folder = tmp_path_factory.mktemp("generate")
    train(
        folder,
        *("data=text", f"data.path={text_folder(folder)}", "data.vocab_size=400", "data.block_size=32"),
        *("callbacks=[ema,best]", "callbacks.weight_average.decay=0.9"),
        *("trainer.val_check_interval=10", "trainer.max_steps=20", *TINY_MODEL),
        *("optimizer.lr=1e-2", "callbacks.checkpoint.every_n_train_steps=10", "hydra.run.dir=out"),
    )
    return folder


def greedy_text(folder: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokens = model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=12, do_sample=False)
    return tokenizer.decode(tokens[0], skip_special_tokens=True)


def said(capsys: Any, *overrides: str) -> str:
    """Return what ``mode=generate`` prints, in this process."""
    generate(composed(*with_run([*GREEDY, "trainer.accelerator=cpu", *overrides])))
    return capsys.readouterr().out


def test_a_checkpoint_and_the_exported_folder_continue_a_prompt_as_transformers_does(run, tmp_path, capsys):
    exported = run / "out" / "exported"
    expected = greedy_text(exported).strip()
    best = next((run / "out" / "checkpoints").glob("best-*.ckpt"))
    finished = train(tmp_path, *GREEDY, f"ckpt_path={best}")
    assert finished.output.strip() == expected, "the text, and nothing else"
    from_folder = ["model=pretrained", f"model.path={exported}"]
    assert said(capsys, *from_folder).strip() == expected
    assert said(capsys, *from_folder, "precision=bf16-true", "generate.max_new_tokens=1").startswith(PROMPT)
    assert said(capsys, *from_folder, "generate.temperature=5", "seed=2") != expected


def test_without_trained_weights_the_mode_refuses_in_one_sentence(run, tmp_path, capsys):
    best = next((run / "out" / "checkpoints").glob("best-*.ckpt"))
    alone = shutil.copy(best, tmp_path / "alone.ckpt")
    tiny_model("llama").save_pretrained(tmp_path / "bare")
    for overrides, message in (
        ([], "mode=generate needs trained weights, and this model would have random ones"),
        ([f"ckpt_path={alone}"], "no folder above .*alone.ckpt is that of a run"),
        (["model=pretrained", f"model.path={tmp_path / 'bare'}"], "no tokenizer could be loaded from .*bare"),
        ([f"ckpt_path={best}", "generate.max_new_tokens=2000"], "more than the 1024 positions"),
    ):
        with pytest.raises(UserError, match=message) as refused:
            said(capsys, *overrides)
        assert "\n" not in str(refused.value)


def test_a_run_is_loaded_in_a_program_from_its_folder_a_checkpoint_or_what_it_exported(run, tmp_path):
    shutil.copytree(run / "out", tmp_path / "out")
    checkpoints, tokens = tmp_path / "out" / "checkpoints", torch.arange(6)[None]
    earlier = torch.load(checkpoints / "last.ckpt", weights_only=True)
    earlier |= {"global_step": earlier["global_step"] - 1, "optimizer_states": []}
    for weight in earlier["state_dict"].values():
        weight.zero_()
    torch.save(earlier, checkpoints / "step-000001.ckpt")  # Copies are written in any order.
    expected: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "exported")
    best, exported, newest, last = map(
        lit_fused.load,
        (next(checkpoints.glob("best-*.ckpt")), tmp_path / "out/exported", tmp_path / "out", checkpoints / "last.ckpt"),
    )
    for module in (best, exported):
        assert torch.equal(module.backbone(tokens).logits, expected(tokens).logits)
    assert all(map(torch.equal, newest.state_dict().values(), last.state_dict().values()))
    assert not newest.training
    assert newest.generate(tokens, max_new_tokens=2).shape == (1, 8)
    shutil.rmtree(checkpoints)
    assert torch.equal(lit_fused.load(tmp_path / "out").backbone(tokens).logits, expected(tokens).logits)
    with pytest.raises(UserError, match="there is no"):
        lit_fused.load(tmp_path / "nothing")


# The tests below show which weights are taken.


class Scores(L.Callback):
    """The second validation is the best."""

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log("score", float((3, 1, 2, 4)[trainer.current_epoch]))


def best_run(folder: Path, backbone: Any, *callbacks: L.Callback) -> tuple[FusedCausalLMModule, ModelCheckpoint]:
    module = FusedCausalLMModule(backbone)
    saver = ModelCheckpoint(folder, monitor="score", save_on_train_epoch_end=False)
    every = [*callbacks, Scores(), saver, ExportPretrained(folder / "best", which="best")]
    trainer = quiet_trainer(folder, max_epochs=4, callbacks=every, enable_checkpointing=True)
    trainer.fit(module, loader(ragged_batches(1)), loader(ragged_batches(1)))
    assert "step=2" in saver.best_model_path
    return module, saver


def test_the_best_adapters_are_merged_into_the_weights_that_they_were_trained_beside(tmp_path):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_model("llama"), settings)
    _, saver = best_run(tmp_path, model)
    best = FusedCausalLMModule(copy.deepcopy(model))
    best.load_state_dict(torch.load(saver.best_model_path, weights_only=True)["state_dict"])
    best.save_pretrained(tmp_path / "expected")
    a, b = (AutoModelForCausalLM.from_pretrained(tmp_path / f).state_dict() for f in ("best", "expected"))
    assert all(torch.equal(a[key], b[key]) for key in b)


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_a_checkpoint_of_a_run_with_an_average_gives_the_average_that_it_was_judged_by(name, tmp_path):
    validated: list[dict[str, Any]] = []

    class Validated(L.Callback):
        def on_validation_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any, **__: Any) -> None:
            named = pl_module.named_parameters(remove_duplicate=False)
            validated.append({key: p.detach().clone() for key, p in named})

    _, saver = best_run(tmp_path, tiny_model(name), WeightAverage(0.5), Validated())
    weights = read_weights(saver.best_model_path)
    exported: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    for key, p in validated[1].items():
        assert torch.equal(weights[key], p), key
        assert torch.equal(exported.get_parameter(key.removeprefix("model.backbone.")), p), key


def test_the_best_weights_need_a_metric_and_without_a_validation_the_last_ones_are_exported(tmp_path):
    with pytest.raises(UserError, match="which must be one of last, best, got 'first'"):
        ExportPretrained(tmp_path, which="first")
    best = ExportPretrained(tmp_path / "out", which="best")
    with pytest.raises(UserError, match="there is none; choose callbacks=best"):
        quiet_trainer(tmp_path, max_steps=1, callbacks=[best]).fit(FusedCausalLMModule(tiny_model("llama")), Words(97))
    saver = ModelCheckpoint(tmp_path, monitor="val/loss", save_on_train_epoch_end=False)
    module = FusedCausalLMModule(tiny_model("llama"))
    trainer = quiet_trainer(tmp_path, max_steps=1, callbacks=[best, saver], enable_checkpointing=True)
    with pytest.warns(UserWarning, match="no checkpoint was compared by val/loss; the last weights are exported"):
        trainer.fit(module, Words(97))
    exported: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(exported.lm_head.weight, module.backbone.get_parameter("lm_head.weight"))
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 97


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tied", "resized", "merged"])
def test_an_exported_folder_generates_what_the_module_does(kind, tmp_path):
    folder = pretrained(tmp_path / "model", "llama_tied")
    backbone: Any = lit_fused.from_pretrained(folder, vocab_size=110 if kind == "resized" else None, at_once=True)
    if kind == "merged":
        peft = pytest.importorskip("peft")
        settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False)
        backbone = peft.get_peft_model(backbone, settings)
    module = FusedCausalLMModule(backbone.train())
    quiet_trainer(tmp_path, max_steps=2).fit(module, datamodule=Words(97))
    module.save_pretrained(tmp_path / "out", word_tokenizer(97))
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(model.lm_head.weight) == model.config.vocab_size == (110 if kind == "resized" else 97)
    prompt = tiny_batch()["input_ids"][:1, :6]
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    ours, theirs = (m.generate(prompt, attention_mask=torch.ones_like(prompt), **options) for m in (module, model))
    assert torch.equal(ours, theirs)


# Special tokens.


def test_a_generation_config_has_the_tokenizers_ends_beside_those_that_a_pretrained_model_knows(tmp_path):
    tokenizer = word_tokenizer(97)  # pad 0, bos 1, eos 2
    fresh = tiny_model("llama")
    fresh.generation_config = GenerationConfig(eos_token_id=9, pad_token_id=8)
    found = generation_config(fresh, tokenizer)
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (1, 2, 0)
    assert fresh.generation_config.eos_token_id == 9, "the model's own has been changed"
    known: Any = AutoModelForCausalLM.from_pretrained(pretrained(tmp_path))
    known.generation_config = GenerationConfig(eos_token_id=[9, 7])
    found = generation_config(known, tokenizer)
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (1, [9, 7, 2], 0)
    known.generation_config.pad_token_id = 5
    assert generation_config(known, tokenizer).pad_token_id == 5, "what a pretrained model has learned"
    known.generation_config.pad_token_id = None
    tokenizer.pad_token = None
    assert generation_config(known, tokenizer).pad_token_id == 9
    tokenizer.eos_token = None
    known.generation_config = GenerationConfig()
    assert generation_config(known, tokenizer).eos_token_id is None


def test_the_exported_folder_has_the_special_tokens_of_its_tokenizer(run):
    config = json.loads((run / "out" / "exported" / "generation_config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"], config["bos_token_id"]) == (0, 1, 0)


def test_prompts():
    tokenizer = word_tokenizer(20)
    assert encode_prompt("w4 w5", tokenizer, chat=False).tolist() == [[4, 5]]
    assert encode_prompt("", tokenizer, chat=False).tolist() == [[1]]
    tokenizer.chat_template = "{% for m in messages %}w9 {{ m.content }} w10 {% endfor %}"
    assert encode_prompt("w4", tokenizer, chat=True).tolist() == [[9, 4, 10]]
    assert continuation(torch.tensor([4, 5, 6, 2]), 2, tokenizer) == " w6"


def test_a_damaged_tokenizer_of_a_run_is_named(tmp_path):
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "tokenizer_config.json").write_text("[")
    with pytest.raises(UserError, match=f"no tokenizer could be loaded from .*{tmp_path / 'exported'}: Expecting"):
        tokenizer_of(tmp_path, DictConfig({}))
