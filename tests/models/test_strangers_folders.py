"""Test that nothing in a stranger's folder of a model or a tokenizer runs, asks, or brings code from the Hub."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import SYNTHETIC, TINY_MODEL, train
from pretrained_folders import pretrained, word_tokenizer
from tiny_models import VOCABULARY
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from vision_cases import llava

import lit_fused
from lit_fused import FusedCausalLMModule, UserError
from lit_fused.data.tokenizer import load_tokenizer
from lit_fused.models.load import materialize
from lit_fused.models.tokenizer_fit import fit_vocabulary

CODE = "from pathlib import Path\nPath({!r}).touch()\n"
MAP = {
    "AutoConfig": "code.Config",
    "AutoModelForCausalLM": "code.Model",
    "AutoTokenizer": [None, "code.Tokenizer"],
    "AutoProcessor": "code.Processor",
}


@pytest.fixture
def no_terminal(monkeypatch) -> None:
    """A question at the terminal is answered with yes, as by a user in a hurry."""
    monkeypatch.setattr("builtins.input", lambda question: "y")


def with_code(folder: Path, ran: Path, *, known: bool) -> Path:
    """A folder of a model with code in it; transformers has a class of its own for the model if ``known``."""
    pretrained(folder)
    (folder / "code.py").write_text(CODE.format(str(ran)))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(CODE.format(str(ran)))
    changes = {"auto_map": MAP} | ({} if known else {"tokenizer_class": "OfTheirOwn"})
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps(content))
    if not known:
        content = json.loads((folder / "config.json").read_text()) | {"model_type": "theirs"}
        (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("at_once", [False, True])
def test_code_in_a_models_folder_neither_runs_nor_asks(at_once, known, no_terminal, tmp_path):
    folder, ran = with_code(tmp_path / "model", tmp_path / "ran", known=known), tmp_path / "ran"
    if known:
        model = lit_fused.from_pretrained(folder, at_once=at_once)
        fit_vocabulary(FusedCausalLMModule(model).model, word_tokenizer(VOCABULARY))
        assert type(lit_fused.load(folder).model.transformers_model).__module__.startswith("transformers.")
    else:
        for load in (lambda: lit_fused.from_pretrained(folder, at_once=at_once), lambda: lit_fused.load(folder)):
            with pytest.raises(UserError, match="contains custom code"):
                load()
    assert not ran.exists()


def test_code_in_a_tokenizers_folder_neither_runs_nor_asks(no_terminal, tmp_path):
    folder, ran = with_code(tmp_path / "model", tmp_path / "ran", known=False), tmp_path / "ran"
    with pytest.raises(UserError, match=r"no tokenizer could be loaded from data.tokenizer=") as error:
        load_tokenizer(folder)
    assert "\n" not in str(error.value)
    model = lit_fused.from_pretrained(pretrained(tmp_path / "good"))
    shutil.copy(folder / "tokenizer_config.json", tmp_path / "good")
    shutil.copy(folder / "code.py", tmp_path / "good")
    fit_vocabulary(FusedCausalLMModule(model).model, word_tokenizer(VOCABULARY))
    assert not ran.exists()


COMMANDS: dict[str, list[str]] = {
    "fit": ["data=text", "data.path=a.txt", "data.tokenizer=FOLDER", "model=pretrained", "model.path=FOLDER"],
    "teacher": ["module=distillation", "teacher=pretrained", "teacher.path=FOLDER", *TINY_MODEL, *SYNTHETIC],
    "lora": ["model=lora", "model@model.model=pretrained", "model.model.path=FOLDER", *SYNTHETIC],
    "prepare": ["mode=prepare", "data=text", "data.path=a.txt", "data.tokenizer=FOLDER"],
    "rollouts": ["module=policy", "data=rollouts", "data.path=r.jsonl", "data.tokenizer=FOLDER", *TINY_MODEL],
    "generate": ["mode=generate", "model=pretrained", "model.path=FOLDER", "prompt=w3", "generate.max_new_tokens=2"],
    "score": ["mode=score", "model=pretrained", "model.path=FOLDER", "data=text", "data.path=a.txt"],
    "plan": ["mode=plan", "model=pretrained", "model.path=FOLDER", *SYNTHETIC],
    "transformers' own class": [
        *("model._target_=transformers.AutoModelForCausalLM.from_pretrained", "~model.config", "~model.seed"),
        *("+model.pretrained_model_name_or_path=FOLDER", *SYNTHETIC),
    ],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_runs_or_offers_to_run_the_code_of_a_folder(name, tmp_path):
    with_code(tmp_path / "FOLDER", tmp_path / "ran", known=False)
    (tmp_path / "a.txt").write_text("w3 w4 w5\n" * 50)
    (tmp_path / "r.jsonl").write_text('{"prompt": "w3", "completion": "w4", "reward": 1.0}\n' * 4)
    finished = train(tmp_path, *COMMANDS[name], "trainer.max_steps=1", "hydra.run.dir=out", status=1)
    assert "y/N" not in finished.output
    assert "FOLDER" in finished.plain
    assert not (tmp_path / "ran").exists()


KERNEL = "kernels-community/flash-attn3"


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("_attn_implementation", KERNEL),
        ("attn_implementation", KERNEL),
        ("attn_implementation", {"": "someone/else@main:attention"}),
        ("_attn_implementation", "flash_attention_2"),
        ("experts_implementation", "sonicmoe"),
    ],
)
def test_an_implementation_that_a_folder_names_brings_no_code_from_the_hub(entry, value, at_once, tmp_path):
    folder = pretrained(tmp_path / "model")
    written = folder / "config.json"
    written.write_text(json.dumps(json.loads(written.read_text()) | {entry: value}))
    with pytest.warns(UserWarning, match=f"config.json of .* asks for {entry}=.*which could run code of the Hub"):
        model = lit_fused.from_pretrained(folder, at_once=at_once)
    materialize(model)
    plain = AutoModelForCausalLM.from_pretrained(pretrained(tmp_path / "plain"))
    assert model.config._attn_implementation == plain.config._attn_implementation == "sdpa"
    batch = torch.arange(3, 9)[None]
    torch.testing.assert_close(model(batch).logits, plain(batch).logits)
    assert model.name_or_path == str(folder)


def test_what_a_folder_says_of_a_part_of_its_model_brings_no_code_either(tmp_path):
    folder = tmp_path / "model"
    AutoModelForImageTextToText.from_config(llava()).save_pretrained(folder)
    written = folder / "config.json"
    content = json.loads(written.read_text())
    content["text_config"]["_attn_implementation"] = KERNEL
    written.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="asks for _attn_implementation=kernels-community"):
        model = lit_fused.from_pretrained(folder)
    assert type(model.config.text_config).__name__ == "LlamaConfig"
    assert model.config.text_config._attn_implementation == "sdpa"


def test_torchs_own_attention_is_used_where_a_folder_names_it_and_the_users_choice_comes_first(tmp_path):
    folder = pretrained(tmp_path / "model")
    written = folder / "config.json"
    written.write_text(json.dumps(json.loads(written.read_text()) | {"attn_implementation": "eager"}))
    assert lit_fused.from_pretrained(folder).config._attn_implementation == "eager"
    assert lit_fused.from_pretrained(folder, attn_implementation="sdpa").config._attn_implementation == "sdpa"
    with pytest.raises(ImportError, match="kernels"):  # asks for the package that would load it
        lit_fused.from_pretrained(folder, attn_implementation=KERNEL)
