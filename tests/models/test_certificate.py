"""``lit_fused.certify``: a head's formula, and errors that are those which a float64 copy of the model shows."""

import copy
import json
import pickle
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import ENTRIES
from architectures import tiny_model as tiny_architecture
from commands import train
from lightning_helpers import loader, quiet_trainer
from peft import LoraConfig, get_peft_model
from pretrained_folders import pretrained
from test_architectures import EXPECTED_REFUSALS
from tiny_models import MASKED_MODELS, MODELS, VOCABULARY, sharpen, tiny_batch, tiny_llama, tiny_model
from tiny_seq2seq import tiny_seq2seq
from torch import nn

import lit_fused
from lit_fused import FusedCausalLMModule, LanguageModel, LinearCrossEntropyLoss, UserError, filtered
from lit_fused.callbacks import ExportPretrained
from lit_fused.models.certificate import certificate_of, certify_folder, text_of
from lit_fused.ops import linear_cross_entropy

NAMES = ("loss", "hidden_states", "weights")
FORMULAS = {
    "llama": "h W^T",
    "phi": "h W^T + b",
    "granite": "0.25 (h W^T)",
    "gemma2": "4 tanh((h W^T) / 4)",
    "mixtral": "h W^T",
}


def assert_as_near_as_its_own_head(certificate: dict[str, Any], rounding: float = 2.4e-7) -> None:
    for name in NAMES:
        fused, own = certificate[f"fused/{name}"], certificate[f"own/{name}"]
        assert fused <= 2 * own + rounding, f"{name}: {fused:.2g}, its own {own:.2g}"


@pytest.mark.parametrize("name", [*MODELS, *MASKED_MODELS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_loss_is_as_near_to_float64_as_a_models_own_head(name, dtype):
    certificate = lit_fused.certify(sharpen(tiny_model(name, dtype)))
    assert_as_near_as_its_own_head(certificate)
    assert certificate["formula"] == FORMULAS.get(name, certificate["formula"])
    eps = torch.finfo(dtype).eps
    assert all(0.05 * eps < certificate[f"own/{kind}"] < 4 * eps for kind in ("hidden_states", "weights"))


def test_the_errors_of_the_own_head_are_those_beside_a_float64_copy_of_the_model():
    model = sharpen(tiny_model("gemma2", torch.bfloat16)).eval()
    certificate = lit_fused.certify(model)
    targets = torch.randint(VOCABULARY, (32,), generator=torch.Generator().manual_seed(0))
    hidden_states = model.model(torch.arange(10, 42).view(4, 8)).last_hidden_state.detach()
    gradients = []
    for each, dtype in ((model, torch.float32), (copy.deepcopy(model).double(), torch.float64)):
        leaf, head = hidden_states.to(each.dtype).requires_grad_(), each.lm_head.weight
        logits = 4 * torch.tanh((leaf @ head.T) / 4)
        gradients.append(torch.autograd.grad(F.cross_entropy(logits.to(dtype).flatten(0, 1), targets), [leaf, head]))
    for name, ours, exact in zip(NAMES[1:], *gradients, strict=True):
        error = (ours.double() - exact).norm() / exact.norm()
        assert certificate[f"own/{name}"] == pytest.approx(error.item(), rel=0.05)


def one_percent_too_large(hidden_states: Any, weight: Any, targets: Any, **options: Any) -> Any:
    return 1.01 * linear_cross_entropy(hidden_states, weight, targets, reduction="sum", **options)[0]


def test_the_errors_of_a_wrong_backend_are_its_own():
    certificate = lit_fused.certify(tiny_model("llama"), LinearCrossEntropyLoss(one_percent_too_large))
    assert [certificate[f"fused/{name}"] for name in NAMES] == pytest.approx([0.01] * 3, rel=1e-3)
    assert all(certificate[f"own/{name}"] < 1e-6 for name in NAMES)
    assert "| loss | 1.0e-02 |" in text_of(certificate)


def test_a_backend_that_approximates_its_gradients_is_compared_by_its_loss():
    certificate = lit_fused.certify(tiny_model("llama"), LinearCrossEntropyLoss(filtered.Filtered()))
    assert certificate["fused/loss"] < 1e-6
    assert "fused/weights" not in certificate
    assert text_of(certificate).count("approximate on purpose") == 2


ADAPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "the head": ("llama", {"target_modules": ["q_proj", "lm_head"]}),
    "a tied head": ("llama_tied", {"target_modules": ["q_proj", "lm_head"]}),
    "other layers": ("gemma2", {"target_modules": ["q_proj"]}),
    "a trained copy": ("phi", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "some rows": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [3, 5]}}),
    "some tied rows": ("llama_tied", {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]}),
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`", "ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ADAPTED)
def test_adapters_are_measured_by_what_they_train(case, dtype):
    name, options = ADAPTED[case]
    torch.manual_seed(0)
    model = get_peft_model(sharpen(tiny_model(name, dtype), 5.0), LoraConfig(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)) * p.requires_grad)
    certificate = lit_fused.certify(model)
    if case == "other layers":  # Its head is frozen, and has no gradient.
        assert not {"fused/weights", "own/weights"} & certificate.keys()
        certificate |= {"fused/weights": 0.0, "own/weights": 0.0}
    # PEFT computes with adapters in float32, and the fused loss in the dtype of the weight that they are put beside.
    assert_as_near_as_its_own_head(certificate, rounding=torch.finfo(dtype).eps / 2)


def test_an_encoder_decoder_is_measured_at_its_decoder():
    certificate = lit_fused.certify(tiny_seq2seq("bart"))
    assert_as_near_as_its_own_head(certificate)
    assert certificate["formula"] == "h W^T + final_logits_bias"


class OwnHead(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).sin()


def test_a_model_whose_head_no_formula_covers_is_named_with_the_reason():
    model = tiny_llama()
    model.lm_head = OwnHead(32, VOCABULARY, bias=False)
    certificate = lit_fused.certify(model)
    assert certificate["model"] == "LlamaForCausalLM"
    assert "OwnHead, not a plain linear layer" in str(certificate["refused"])
    assert "formula" not in certificate
    assert "refused: LlamaForCausalLM cannot be trained with a fused loss" in text_of(certificate)
    with pytest.raises(UserError, match="takes a transformers model, got Linear"):
        lit_fused.certify(nn.Linear(2, 2))


def test_a_model_is_left_as_it_was():
    model = tiny_model("gemma2")
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with torch.inference_mode():
        lit_fused.certify(model)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("entry", [pytest.param(entry, id=str(entry)) for entry in ENTRIES])
def test_every_architecture_gets_a_certificate_or_is_refused_by_name(entry):
    model = tiny_architecture(entry)
    try:
        certificate = lit_fused.certify(model)
    except Exception:
        with pytest.raises(Exception):  # noqa: B017, PT011 - the model's own, which takes no tokens alone
            model(input_ids=torch.arange(10, 18)[None])
        return
    if str(entry) in EXPECTED_REFUSALS:
        assert "refused" in certificate
    else:
        assert_as_near_as_its_own_head(certificate)


# The checkpoint and the card


def test_a_checkpoint_and_the_model_card_have_the_certificate_of_their_run(tmp_path):
    module = FusedCausalLMModule(tiny_model("gemma2"))
    trainer = quiet_trainer(tmp_path, max_steps=2, callbacks=[ExportPretrained(tmp_path / "exported")])
    trainer.fit(module, loader([tiny_batch()] * 2))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    certificate = torch.load(tmp_path / "last.ckpt", weights_only=True)["certificate"]
    assert_as_near_as_its_own_head(certificate)
    assert all(type(value) in (str, int, float) for value in certificate.values())
    assert json.loads(json.dumps(certificate)) == certificate
    card = (tmp_path / "exported" / "README.md").read_text()
    assert text_of(module.certify() or {}) in card
    assert "`logits = 4 tanh((h W^T) / 4)`" in card


class NeedsImages(type(tiny_llama())):
    def forward(self, *args: Any, pixels: Any = None, **kwargs: Any) -> Any:
        if pixels is None:
            raise KeyError("pixels")
        return super().forward(*args, **kwargs)


def test_a_run_whose_model_does_not_run_on_tokens_alone_says_so_and_goes_on(tmp_path):
    module = FusedCausalLMModule(tiny_llama(NeedsImages))
    trainer = quiet_trainer(tmp_path, max_steps=1)
    trainer.fit(module, loader([tiny_batch() | {"pixels": torch.zeros(2, 1)}]))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    certificate = torch.load(tmp_path / "last.ckpt", weights_only=True)["certificate"]
    assert certificate["not_measured"] == "KeyError: 'pixels'"
    assert certificate["formula"] == "h W^T"


def test_a_model_that_ranks_divide_has_its_formula_and_says_what_measures_it():
    model = LanguageModel(tiny_model("granite"), LinearCrossEntropyLoss())
    model.prepare(torch.device("cpu"))
    certificate = certificate_of(model, divided=True)
    assert certificate is not None
    assert certificate["formula"] == "0.25 (h W^T)"
    assert "lit-fused --certify FOLDER" in certificate["not_measured"]
    assert not any("/" in name for name in certificate)
    assert f"not measured: {certificate['not_measured']}" in text_of(certificate)


def test_a_copy_on_the_path_has_its_own_version_whatever_is_installed(tmp_path, monkeypatch):
    metadata = tmp_path / "lit_fused-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: lit-fused\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert version("lit-fused") == "9.9"
    assert lit_fused.certify(tiny_llama())["lit_fused"] == lit_fused.__version__ != "9.9"


# The command, on a folder of a stranger


def test_the_command_prints_the_certificate_of_a_folder_in_its_dtype(tmp_path):
    folder = pretrained(tmp_path / "model", "gemma2", torch.bfloat16)
    finished = train(tmp_path, "--certify", str(folder))
    assert finished.output.strip() == text_of(certify_folder(folder))
    assert "32 tokens in bfloat16 on cpu | fused loss (chunked) | the model's own head |" in finished.output
    assert {path.name for path in tmp_path.iterdir()} <= {"model", "hf"}


class Marks:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_the_command_runs_nothing_of_a_folder_and_reads_safetensors_alone(tmp_path):
    folder, ran = pretrained(tmp_path / "model"), tmp_path / "ran"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Marks(ran)))
    (folder / "code.py").write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\n")
    written = folder / "config.json"
    written.write_text(json.dumps(json.loads(written.read_text()) | {"auto_map": {"AutoModelForCausalLM": "code.M"}}))
    finished = train(tmp_path, "--certify", str(folder), status=1)
    assert "cannot be loaded" in finished.plain
    assert "safetensors" in finished.plain
    assert "Traceback" not in finished.output
    assert not ran.exists()


def test_the_command_says_what_it_lacks(tmp_path):
    for words, said in (["--certify"], "takes one folder"), (["--certify", "nowhere"], "nowhere cannot be loaded"):
        finished = train(tmp_path, *words, status=1)
        assert said in finished.plain
        assert "Traceback" not in finished.output
