"""Encoder-decoders: loss and gradients of their own logits, whole training runs, generation, and what is refused."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import loss_and_gradients
from errors_of import assert_as_near
from lightning_helpers import loader, quiet_trainer
from tiny_models import sharpen, tiny_model
from tiny_seq2seq import BART, MODELS, START, T5, VOCABULARY, pair_batch, tiny_seq2seq
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

import lit_fused
from lit_fused import FusedCausalLMModule, FusedSeq2SeqLMModule, LinearCrossEntropyLoss, Seq2SeqLanguageModel, UserError

CPU = torch.device("cpu")
QUICK = {"t5", "t5_gated", "bart", "mbart"}
EVERY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS]


def ragged_pairs(count: int) -> list[dict[str, Tensor]]:
    """Batches whose numbers of valid labels differ widely; the third has none at all."""
    return [pair_batch(2, ignored=(0, 5, 7, 3, 6)[index % 5], seed=index) for index in range(count)]


def own_logits(backbone: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return what the model answers when it is given labels, and so makes its decoder inputs itself."""
    return backbone(**batch, use_cache=False).logits


def from_logits(backbone: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The definition: the model's own logits, upcast, and the cross entropy of each label with its own position."""
    logits = own_logits(backbone, batch).flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return loss_and_gradients(backbone, F.cross_entropy(logits, batch["labels"].flatten()))


def language_model(backbone: nn.Module, loss: Any = None) -> Seq2SeqLanguageModel:
    model = Seq2SeqLanguageModel(backbone, LinearCrossEntropyLoss() if loss is None else loss)
    model.prepare(CPU)
    return model


# One batch: every architecture, every loss


@pytest.mark.parametrize("name", EVERY)
def test_loss_and_every_gradient_are_those_of_the_models_own_logits(name):
    backbone = sharpen(tiny_seq2seq(name), 3.0).eval()
    exact = copy.deepcopy(backbone).double()
    batch = pair_batch()
    if name == "led":
        del batch["attention_mask"]  # with padding, LED's own gradients in float64 are not numbers
    truth, standard = from_logits(exact, batch), from_logits(backbone, batch)
    ours = loss_and_gradients(backbone, language_model(backbone)(batch).loss)
    assert_as_near(ours, standard, truth, 4 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("name", ["t5", "mbart"])
def test_decoder_inputs_in_the_batch_are_taken_as_they_are(name):
    backbone: Any = sharpen(tiny_seq2seq(name), 3.0)
    model = language_model(backbone)
    batch = pair_batch()
    other = batch | {"decoder_input_ids": pair_batch(seed=9, ignored=0)["labels"]}
    expected = F.cross_entropy(own_logits(backbone, other).flatten(0, 1), batch["labels"].flatten())
    torch.testing.assert_close(model(other).loss, expected)
    assert not torch.allclose(model(batch).loss, expected)

    made = backbone.prepare_decoder_input_ids_from_labels(batch["labels"])
    assert torch.equal(model(batch | {"decoder_input_ids": made}).loss, model(batch).loss)


def test_a_model_without_a_start_token_says_what_to_set():
    config = AutoConfig.for_model("t5", vocab_size=VOCABULARY, **{**T5, "decoder_start_token_id": None})
    model = language_model(AutoModelForSeq2SeqLM.from_config(config))
    with pytest.raises(UserError, match="T5ForConditionalGeneration needs decoder_start_token_id and pad_token_id"):
        model(pair_batch())


@pytest.mark.parametrize("by", ["module", "fuse"])
def test_an_encoder_of_sounds_learns_and_generates_as_by_itself(by):
    sizes: dict[str, Any] = {"num_mel_bins": 8, "max_source_positions": 20, "begin_suppress_tokens": None}
    config = AutoConfig.for_model("whisper", **BART | sizes, vocab_size=VOCABULARY)
    backbone: Any = sharpen(AutoModelForSpeechSeq2Seq.from_config(config), 3.0).eval()
    sounds = {"input_features": torch.randn(3, 8, 40)}
    batch = sounds | {"labels": pair_batch()["labels"]}
    own = loss_and_gradients(backbone, backbone(**batch).loss)
    said = backbone.generate(**sounds, max_new_tokens=5)
    model: Any = lit_fused.fuse(backbone) if by == "fuse" else FusedSeq2SeqLMModule(backbone)
    ours = loss_and_gradients(backbone, model(**batch).loss if by == "fuse" else model.model(batch).loss)
    assert distance(ours, own) <= 1e-6 * size(own)
    assert torch.equal(model.generate(**sounds, max_new_tokens=5), said)


def distance(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    assert found.keys() == truth.keys()
    return math.sqrt(sum((found[n].double() - truth[n].double()).square().sum().item() for n in truth))


def size(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors.values()))


def test_the_saved_model_reloads_with_the_same_answers(tmp_path):
    module = FusedSeq2SeqLMModule(tiny_seq2seq("t5_gated"))
    quiet_trainer(tmp_path, max_epochs=1).fit(module, loader(ragged_pairs(2)))
    module.save_pretrained(tmp_path / "exported")
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "exported")
    for name, tensor in module.backbone.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    batch = pair_batch()
    assert torch.equal(
        module.generate(batch["input_ids"], max_new_tokens=8, do_sample=False),
        loaded.generate(batch["input_ids"], max_new_tokens=8, do_sample=False),
    )
    assert loaded.config.decoder_start_token_id == START


# The tests below show what is refused.


def test_a_causal_model_is_refused_by_name_with_the_module_that_fits():
    with pytest.raises(UserError, match="LlamaForCausalLM is no encoder-decoder; use FusedCausalLMModule"):
        FusedSeq2SeqLMModule(tiny_model("llama"))


def test_an_encoder_decoder_is_refused_by_the_causal_module_with_the_module_that_fits():
    with pytest.raises(UserError, match="T5ForConditionalGeneration is an encoder-decoder.*use FusedSeq2SeqLMModule"):
        FusedCausalLMModule(tiny_seq2seq("t5"))
