"""Every architecture of transformers, in four variants: exactly the model's own cross entropy, or refused by name.

The quick suite has one architecture of each kind; the others are marked slow.
"""

import re

import pytest
import torch
from architectures import (
    ACTIVE_FIELDS,
    ENTRIES,
    EXCEPTIONS,
    OF_EACH_KIND,
    Entry,
    Variant,
    Verdict,
    check,
    fields_of,
    language_model,
    parts_of,
    sharpen,
    tiny_batch,
    tiny_model,
    variants_of,
)
from models_table import DOCUMENT, MODEL, document, row_of, rows_of
from transformers import CONFIG_MAPPING

from lit_fused.errors import UserError
from lit_fused.heads import OutputHead, output_layer
from lit_fused.models import language_model as language_model_file
from lit_fused.models import seq2seq_language_model

# EncoderDecoderModel tells of a change in 2021 whenever it is given labels
pytestmark = pytest.mark.filterwarnings("ignore:Version v4.12.0:FutureWarning")

# Entry -> the reason. A refusal that is not expected here fails, and so does an expected one that does not come.
EXPECTED_REFUSALS = {
    "mobilebert-masked": "its output layer ran 0 times in one forward pass",
    "musicgen-causal": "its output layer is a .*ModuleList, not a plain linear layer",  # one per codebook
    "musicgen_melody-causal": "its output layer is a .*ModuleList, not a plain linear layer",
    "perceiver-masked": r"its get_output_embeddings\(\) is None",
    "prophetnet-causal": r"its output layer gives \(2, 2, 8, 256\) but its logits are \(2, 8, 256\)",  # n-grams
    "prophetnet-seq2seq": r"its output layer gives \(2, 2, 8, 256\) but its logits are \(2, 8, 256\)",
}
EXPECTED_REFUSALS_WHEN_ACTIVE = {
    "gemma4_assistant-causal": "its output layer ran 0 times in one forward pass",  # use_ordered_embeddings
    "gemma4_unified_assistant-causal": "its output layer ran 0 times in one forward pass",
    "reformer-causal": "its output layer ran 2 times in one forward pass",  # chunk_size_lm_head
    "reformer-masked": "its output layer ran 2 times in one forward pass",
    "xlm-causal": "its output layer is a .*AdaptiveLogSoftmaxWithLoss, not a plain linear layer",  # asm
    "xlm-masked": "its output layer is a .*AdaptiveLogSoftmaxWithLoss, not a plain linear layer",
}


def judge(entry: Entry, variant: Variant) -> Verdict:
    """Return the verdict on an entry in a variant, which has to be the one expected."""
    verdict = check(entry, variant)
    reason = EXPECTED_REFUSALS.get(str(entry))
    if variant is Variant.ACTIVE:
        reason = EXPECTED_REFUSALS_WHEN_ACTIVE.get(str(entry), reason)
    if reason is None:
        assert verdict.exact, f"{variant}: {verdict.refusal}"
    else:
        assert not verdict.exact, f"{entry} is exact and no longer a case for EXPECTED_REFUSALS"
        assert re.search(reason, verdict.refusal or ""), f"{variant}: {verdict.refusal}"
    return verdict


@pytest.mark.parametrize("name", sorted(OF_EACH_KIND))
def test_an_architecture_of_each_kind_is_exact_or_refused_with_its_class_and_a_reason(name):
    judge(Entry(*name.rsplit("-", 1)), Variant.DEFAULT)


@pytest.mark.slow
@pytest.mark.parametrize("entry", [pytest.param(entry, id=str(entry)) for entry in ENTRIES])
def test_every_architecture_is_exact_or_refused_in_every_variant_as_its_row_in_the_docs_says(entry):
    row = row_of(entry, {variant: judge(entry, variant) for variant in variants_of(entry)})
    assert row in rows_of(DOCUMENT.read_text()), "run `make models` and look at what changed"


def test_the_page_of_models_has_the_rows_of_this_transformers_and_adds_them_up():
    page = DOCUMENT.read_text()
    rows = rows_of(page)
    found = {(row[MODEL], row["task"]) for row in rows}
    assert found == {(entry.model_type, entry.task) for entry in ENTRIES}
    assert len(rows) == len(ENTRIES)
    assert page == document(rows), "run `make models` and look at what changed"


def _has_router(entry: Entry) -> bool:
    config = CONFIG_MAPPING[entry.model_type]
    parts = parts_of(config, EXCEPTIONS.get(entry.model_type, {})).values()
    return any("output_router_logits" in fields_of(part) for part in (config, *parts))


ROUTER_REFUSALS = {
    "nllb-moe-seq2seq": "has a term"  # without labels, it does not compute it
}


@pytest.mark.slow
@pytest.mark.parametrize("entry", [pytest.param(entry, id=str(entry)) for entry in ENTRIES if _has_router(entry)])
@torch.no_grad()
def test_with_its_routers_loss_the_loss_is_the_models_own_or_refused(entry):
    backbone = tiny_model(entry)
    sharpen(backbone)
    backbone.config.get_text_config().output_router_logits = True
    model = language_model(backbone)
    if str(entry) in ROUTER_REFUSALS:
        with pytest.raises(UserError, match=f"{entry.class_name} .*{ROUTER_REFUSALS[str(entry)]}"):
            model.spot_check(tiny_batch(backbone))
        return
    model.prepare(torch.device("cpu"))
    batch = tiny_batch(backbone)
    model.spot_check(batch)
    own = backbone(**batch, use_cache=False).loss
    torch.testing.assert_close(model(batch).loss, own, rtol=1e-5, atol=0.0)


def test_every_name_in_the_lists_of_this_file_is_an_entry():
    named = OF_EACH_KIND | EXPECTED_REFUSALS.keys() | EXPECTED_REFUSALS_WHEN_ACTIVE.keys()
    assert named <= {str(entry) for entry in ENTRIES}


# Fields whose names speak of logits, but which act elsewhere: on attention scores, gates, routers, generation.
ELSEWHERE = r"att(entio)?n_|gate_|mlp_|router|num_logits_to_keep|per_cell"


def test_every_field_that_speaks_of_logits_is_active_in_the_active_variant_or_known_to_act_elsewhere():
    unknown = set()
    for entry in ENTRIES:
        classes = [CONFIG_MAPPING[entry.model_type]]
        classes += parts_of(classes[0], EXCEPTIONS.get(entry.model_type, {})).values()
        for config_class in classes:
            names = {name for name in fields_of(config_class) if re.search("logit|soft_?cap|lm_head|unpadded", name)}
            unknown |= {name for name in names - ACTIVE_FIELDS.keys() if not re.search(ELSEWHERE, name)}
    assert not unknown


# The judgement itself: it has to see what it is there to see.


@pytest.mark.parametrize(
    ("model_type", "variant"),
    [
        ("gemma2", Variant.DEFAULT),
        ("gemma2", Variant.BFLOAT16),
        ("gemma3_text", Variant.ACTIVE),
        ("cohere", Variant.DEFAULT),
        ("granite", Variant.ACTIVE),
        ("inkling_text", Variant.ACTIVE),
    ],
)
def test_a_softcap_scale_or_slice_that_is_overlooked_is_noticed(monkeypatch, model_type, variant):
    monkeypatch.setattr(language_model_file, "identify_head", lambda model: OutputHead(output_layer(model)))
    monkeypatch.setattr(language_model_file.LanguageModel, "spot_check", lambda *_, **__: None)  # It would refuse it.
    with pytest.raises(AssertionError, match="is wrong by"):
        check(Entry(model_type, "causal"), variant)


def test_labels_compared_with_another_position_are_noticed(monkeypatch):
    monkeypatch.setattr(language_model_file, "shift_labels", lambda labels: labels)
    with pytest.raises(AssertionError, match="loss is wrong by"):
        check(Entry("llama", "causal"))


def test_decoder_inputs_other_than_the_models_own_are_noticed(monkeypatch):
    monkeypatch.setattr(
        seq2seq_language_model, "decoder_inputs", lambda _, labels: {"decoder_input_ids": labels.clamp(min=0)}
    )
    with pytest.raises(AssertionError, match="loss is wrong by"):
        check(Entry("bart", "seq2seq"))


def test_gradients_that_do_not_reach_the_body_are_noticed(monkeypatch):
    with_graph = language_model_file.LanguageModel.hidden_states

    def detached(self, batch):
        hidden_states, head, aux_loss = with_graph(self, batch)
        return hidden_states.detach(), head, aux_loss

    monkeypatch.setattr(language_model_file.LanguageModel, "hidden_states", detached)
    with pytest.raises(AssertionError, match=r"gradients of .* only in one"):
        check(Entry("llama", "causal"))


def test_a_tiny_model_and_its_batch_do_not_depend_on_the_callers_seed():
    entry = Entry("llama", "causal")
    torch.manual_seed(1)
    first = tiny_model(entry)
    torch.manual_seed(2)
    second = tiny_model(entry)
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert torch.equal(tiny_batch(first)["labels"], tiny_batch(second)["labels"])
