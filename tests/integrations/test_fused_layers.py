"""Layers of a fused model that its first training step compiles. A CPU stands for the GPU; no kernel is built."""

import copy
import logging
import pickle
from collections.abc import Iterator
from functools import partialmethod
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_batch, tiny_model
from torch import nn
from torch._dynamo.utils import counters

import lit_fused

BATCH = tiny_batch()
IDS = BATCH["input_ids"][:, :5]


@pytest.fixture(autouse=True)
def cpu_like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("lit_fused.integrations.fuse._COMPILED_ON", ("cpu",))
    monkeypatch.setattr("lit_fused.integrations.fused_layers.compiler_missing", lambda device: None)
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def step(model: Any, **batch: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(**(batch or BATCH)).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def checkpointed(model: Any) -> Any:
    model.activation_checkpointing_enable()
    return model.train()


def adapted(model: Any) -> Any:
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False))


@pytest.mark.parametrize("change", [lambda model: model, checkpointed, adapted])
def test_the_first_training_step_compiles_the_layers_and_losses_and_gradients_stay(change, caplog):
    own = change(tiny_model("llama")).train()
    fused = lit_fused.fuse(copy.deepcopy(own))
    with caplog.at_level(logging.INFO), torch.no_grad():
        fused(**BATCH)
    assert not graphs(), "a model that is not trained is left as it is"
    expected = step(own)
    for _ in range(2):
        torch.testing.assert_close(step(fused), expected)
    assert graphs()
    said = [record.message for record in caplog.records if "layers of the fused model" in record.message]
    assert len(said) == 1
    assert 'compile="none") takes this back' in said[0]


def test_generation_and_evaluation_use_no_compiled_layer_that_they_have_to_wait_for():
    plain: Any = tiny_model("llama").eval()
    model: Any = lit_fused.fuse(tiny_model("llama").train())
    step(model)
    model.eval()
    trained = graphs()
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(IDS, **options), plain.generate(IDS, **options))
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
        assert graphs() == trained
        torch.testing.assert_close(model(**BATCH).loss, plain(**BATCH).loss)
    assert graphs() > trained, "a loss in an evaluation is computed by compiled layers"


def test_rows_of_many_lengths_are_compiled_for_one_length_and_for_any():
    model = lit_fused.fuse(tiny_model("llama").train())
    found = []
    for length in (12, 9, 7, 10, 8, 11):
        step(model, **{name: value[:, :length] for name, value in BATCH.items()})
        found.append(graphs())
    assert found[1:] == [found[1]] * 5


def test_what_is_saved_copied_or_taken_back_is_not_compiled(tmp_path):
    model = lit_fused.fuse(tiny_model("llama").train())
    names = model.state_dict().keys()
    step(model)
    assert model.state_dict().keys() == names
    model.save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path).state_dict().keys() == names
    expected = step(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch._dynamo.reset()
        counters.clear()
        with torch.no_grad():
            twin(**BATCH)
        assert not graphs()
        torch.testing.assert_close(step(twin), expected)
        assert graphs(), "a copy compiles its own layers"
    torch._dynamo.reset()
    counters.clear()
    torch.testing.assert_close(step(lit_fused.unfuse(model))["loss"], step(tiny_model("llama"))["loss"])
    step(lit_fused.fuse(model, compile="none"))
    assert not graphs()


def test_a_model_that_its_owner_compiles_is_compiled_once(caplog):
    whole: Any = torch.compile(lit_fused.fuse(tiny_model("llama").train()), backend="aot_eager")
    in_place: Any = lit_fused.fuse(tiny_model("llama").train())
    in_place.compile()
    by_layer: Any = lit_fused.fuse(tiny_model("llama").train())
    for layer in by_layer.model.layers:
        layer.compile()
    with caplog.at_level(logging.INFO):
        for model in (whole, in_place, by_layer):
            torch.testing.assert_close(step(model)["loss"], step(tiny_model("llama"))["loss"])
    assert "layers of the fused model" not in caplog.text
    assert not any(m._compiled_call_impl for m in whole.modules())


def test_layers_whose_forward_another_library_has_replaced_are_left_as_they_are(caplog):
    model: Any = lit_fused.fuse(tiny_model("llama").train())
    norm = model.model.layers[0].input_layernorm
    norm.forward = type(norm).forward.__get__(norm)
    with caplog.at_level(logging.INFO):
        step(model)
    assert "are not compiled: another library has replaced the forward of their LlamaRMSNorm" in caplog.text
    assert not graphs()


def test_nothing_is_compiled_on_a_cpu_and_other_ways_to_compile_are_refused(monkeypatch):
    monkeypatch.setattr("lit_fused.integrations.fuse._COMPILED_ON", ("cuda",))
    step(lit_fused.fuse(tiny_model("llama").train()))
    assert not graphs()
    with pytest.raises(lit_fused.UserError, match="compile must be one of auto, none, got 'whole'"):
        lit_fused.fuse(tiny_model("llama"), compile="whole")
