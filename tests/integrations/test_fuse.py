"""``fuse``: a model's own loss and gradients, without logits, through calls that any training loop makes."""

import copy
import io
import pickle
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ENTRIES, Entry, sharpen, tiny_batch, tiny_model
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from tiny_models import VOCABULARY
from tiny_models import tiny_batch as llama_batch
from tiny_models import tiny_model as tiny
from tiny_seq2seq import tiny_seq2seq
from torch import Tensor, nn
from torch.nn.utils import prune
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import lit_fused
from lit_fused.heads.probe import without_cache
from lit_fused.losses import CrossEntropyLoss, LinearCrossEntropyLoss

QUICK = {
    "bart-seq2seq",  # adds a buffer to its logits
    "bert-causal",  # its own loss does not shift the labels
    "cohere-causal",  # a scale
    "fsmt-seq2seq",  # makes its decoder's inputs of the encoder's
    "gemma2-causal",  # a softcap
    "llama-causal",
    "mixtral-causal",  # a mixture of experts
    "t5-seq2seq",
}
REFUSED = {
    "gemma4_assistant-causal": "computes no loss of its own",
    "gemma4_unified_assistant-causal": "computes no loss of its own",
    "mobilebert-masked": "its output layer ran 0 times",
    "musicgen-causal": "ModuleList, not a plain linear layer; train this model unfused",
    "musicgen_melody-causal": "ModuleList, not a plain linear layer; train this model unfused",
    "perceiver-masked": "is None",
    "prophetnet-causal": "but its logits are",
    "prophetnet-seq2seq": "but its logits are",
}
NO_OWN_LOSS = {"git-causal"}  # It cuts off the logits of image tokens, also where there is no image.
EPS = torch.finfo(torch.float32).eps


def loss_and_gradients(model: nn.Module, **batch: Any) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().double(), **gradients}


def errors(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, Tensor]:
    """Errors of the loss and of each gradient, relative to the loss and to all gradients together."""
    assert found.keys() == truth.keys()
    whole = torch.stack([value.norm() for name, value in truth.items() if name != "loss"]).norm()
    return {name: (found[name] - value).norm() / (value if name == "loss" else whole) for name, value in truth.items()}


def assert_as_exact(found: dict[str, Tensor], own: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    """Errors against float64 are at most twice those of the model's own loss, and rounding."""
    usual = errors(own, truth)
    for name, error in errors(found, truth).items():
        assert error <= 2 * usual[name] + 4 * EPS, f"{name} is wrong by {error:.2g}, by its own loss {usual[name]:.2g}"


def compare(model: nn.Module, **batch: Any) -> None:
    """Compare the fused model with itself before."""
    exact, own = copy.deepcopy(model), loss_and_gradients(model, **batch)
    fused = lit_fused.fuse(model)
    assert fused is model
    assert not isinstance(model(**batch).logits, Tensor)
    found = loss_and_gradients(model, **batch)
    if max(errors(found, own).values()) <= 8 * EPS:
        return
    if isinstance(exact, PreTrainedModel):
        exact.set_experts_implementation("eager")  # The grouped products have no float64.
    floats = {name: value.double() for name, value in batch.items() if getattr(value, "is_floating_point", bool)()}
    assert_as_exact(found, own, loss_and_gradients(exact.double(), **batch | floats))


def check(entry: Entry) -> None:
    model = tiny_model(entry)
    if str(entry) in REFUSED:
        with pytest.raises(lit_fused.UserError, match=REFUSED[str(entry)]) as refusal:
            lit_fused.fuse(model)
        assert entry.class_name in str(refusal.value)
        assert "forward" not in model.__dict__
        return
    sharpen(model)
    batch: dict[str, Any] = tiny_batch(model) | without_cache(model)
    if str(entry).endswith("masked"):  # It is not to predict what it reads.
        batch["labels"] = batch["labels"].flip(-1)
    if str(entry) in NO_OWN_LOSS:
        assert lit_fused.fuse(model)(**batch).loss.isfinite()
        return
    compare(model, **batch)


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny("llama")


BATCH = llama_batch()


@pytest.mark.parametrize("name", sorted(QUICK))
def test_loss_and_gradients_are_the_models_own(name):
    check(Entry(*name.rsplit("-", 1)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Version v4.12.0:FutureWarning")
@pytest.mark.parametrize("entry", [pytest.param(entry, id=str(entry)) for entry in ENTRIES if str(entry) not in QUICK])
def test_loss_and_gradients_of_every_architecture_are_its_own_or_it_is_refused(entry):
    check(entry)


@pytest.mark.parametrize("arguments", [{"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(7)}, {}])
def test_a_call_means_what_it_means_to_transformers(model, arguments):
    shifted = torch.randint(VOCABULARY, BATCH["labels"].shape)
    for batch in (BATCH | arguments, BATCH | arguments | {"shift_labels": shifted}):
        own, truth = loss_and_gradients(model, **batch), loss_and_gradients(copy.deepcopy(model).double(), **batch)
        assert_as_exact(loss_and_gradients(lit_fused.fuse(model), **batch), own, truth)
        lit_fused.unfuse(model)


@pytest.mark.parametrize("name", ["bert-causal", "llama-causal"])
def test_an_ignore_index_that_the_own_loss_takes_is_taken(name):
    model = tiny_model(Entry(*name.rsplit("-", 1)))
    batch = tiny_batch(model)
    batch |= {"labels": batch["labels"].clamp(min=0), "ignore_index": 0}
    assert 0 < (batch["labels"] == 0).sum() < batch["labels"].numel()
    shifted = batch | {"shift_labels": batch["labels"].flip(-1)}
    for given in (batch, shifted):
        own, truth = loss_and_gradients(model, **given), loss_and_gradients(copy.deepcopy(model).double(), **given)
        assert_as_exact(loss_and_gradients(lit_fused.fuse(model), **given), own, truth)
        lit_fused.unfuse(model)


@pytest.mark.parametrize(
    "make", [torch.nn.utils.spectral_norm, partial(prune.l1_unstructured, name="weight", amount=0.3)]
)
def test_a_weight_that_a_hook_of_the_output_layer_makes_is_trained_from_the_first_step(model, make):
    with torch.no_grad():  # What has a graph cannot be copied.
        make(model.lm_head)
    exact, fused = copy.deepcopy(model).double(), lit_fused.fuse(copy.deepcopy(model))
    for _ in range(2):  # A spectral norm goes on in each.
        own, found = loss_and_gradients(model, **BATCH), loss_and_gradients(fused, **BATCH)
        assert_as_exact(found, own, loss_and_gradients(exact, **BATCH))
        assert found["lm_head.weight_orig"].any()


@pytest.mark.parametrize("name", ["bart-causal", "llama-causal", "t5-seq2seq"])
@pytest.mark.parametrize("argument", ["num_items_in_batch", "shift_labels"])
def test_an_argument_that_the_models_own_loss_ignores_is_ignored(name, argument):
    entry = Entry(*name.rsplit("-", 1))
    model = tiny_model(entry)
    sharpen(model)
    batch = tiny_batch(model)
    batch[argument] = torch.tensor(7) if argument == "num_items_in_batch" else batch["labels"].flip(-1)
    own = model(**batch).loss
    torch.testing.assert_close(lit_fused.fuse(model)(**batch).loss, own)


def test_copies_for_several_devices_are_refused(model, monkeypatch):
    wrapped = nn.DataParallel(model)
    assert lit_fused.fuse(wrapped) is wrapped
    torch.testing.assert_close(wrapped(**BATCH).loss, tiny("llama")(**BATCH).loss)  # no device, or one: no copies
    module = sys.modules["torch.nn.parallel.replicate"]
    monkeypatch.setattr(module, "_get_device_index", lambda device, *_: device)
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", lambda tensors, *_, **__: [tensors] * 2)
    with pytest.raises(lit_fused.UserError, match="start one process for each GPU"):
        wrapped.replicate(wrapped.module, [0, 1])
    assert type(lit_fused.unfuse(model)._replicate_for_data_parallel()) is type(model)


def test_labels_and_others_may_be_positional_and_the_answer_a_tuple(model):
    own = model(BATCH["input_ids"], labels=BATCH["labels"], return_dict=False)
    lit_fused.fuse(model)
    found = model(BATCH["input_ids"], None, None, None, None, BATCH["labels"], return_dict=False)
    assert len(found) == len(own) - 1  # no cache
    with pytest.raises(lit_fused.UserError, match="no logits; call the model without labels"):
        found[1].argmax(-1)
    torch.testing.assert_close(found[0], own[0])
    answer = model(**BATCH, output_hidden_states=True)
    assert list(answer) == ["loss", "logits", "hidden_states"]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_documents_packed_into_rows_cannot_attend_to_each_other(model, mode, rows):
    """transformers looks for documents where there is no cache; its models make one unless they are told not to."""
    generator = torch.Generator().manual_seed(2)
    documents = [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in (5, 9, 7)]
    packed: Any = DataCollatorWithFlattening()([{"input_ids": document} for document in documents])
    flipped: Any = DataCollatorWithFlattening()([{"input_ids": document} for document in documents[::-1]])
    batch = {name: torch.cat([packed[name], flipped[name]][:rows]) for name in packed}
    alone = [torch.tensor([document]) for document in documents]
    with torch.no_grad():
        losses = [model(input_ids=ids, labels=ids).loss for ids in alone]
        expected = sum(loss * (ids.numel() - 1) for loss, ids in zip(losses, alone, strict=True)) / (5 + 9 + 7 - 3)
    getattr(lit_fused.fuse(model), mode)()
    with torch.set_grad_enabled(mode == "train"):
        torch.testing.assert_close(model(**batch).loss.detach(), expected)


@pytest.mark.parametrize("name", ["llama-causal", "bert-masked", "mamba-causal", "bart-seq2seq", "t5-seq2seq"])
def test_a_call_with_labels_makes_a_cache_only_if_it_is_asked_for_one(name):
    model = lit_fused.fuse(tiny_model(Entry(*name.rsplit("-", 1))))
    batch = tiny_batch(model)
    assert not {"past_key_values", "cache_params"} & model(**batch).keys()
    if name == "llama-causal":
        assert model(**batch, use_cache=True).past_key_values.get_seq_length() == batch["input_ids"].shape[1]
        assert "past_key_values" not in model(**batch, use_cache=None)
        cache = DynamicCache(config=model.config)
        assert model(**batch, past_key_values=cache).past_key_values is cache


@pytest.mark.parametrize("counted", [{}, {"num_items_in_batch": 0}, {"num_items_in_batch": torch.tensor(0)}])
@pytest.mark.parametrize("impl", ["chunked", "torch_native"])
def test_without_a_valid_label_loss_and_gradients_are_those_of_the_model_itself(model, impl, counted):
    batch = BATCH | {"labels": torch.full_like(BATCH["labels"], -100)} | counted
    expected = loss_and_gradients(model, **batch)
    found = loss_and_gradients(lit_fused.fuse(model, loss=lit_fused.LinearCrossEntropyLoss(impl)), **batch)
    assert found.pop("loss").isnan()
    assert expected.pop("loss").isnan()
    assert found.keys() == expected.keys()
    assert not any(value.any() for value in [*found.values(), *expected.values()])


def test_without_labels_generation_and_all_that_is_saved_are_as_before(model, tmp_path):
    ids = BATCH["input_ids"][:, :5]
    logits, config, state = model(ids).logits, model.config.to_dict(), model.state_dict()
    written = model.generate(ids, max_new_tokens=4, do_sample=False)
    lit_fused.fuse(model)
    assert torch.equal(model(ids).logits, logits)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), written)
    assert model.config.to_dict() == config
    assert model.state_dict().keys() == state.keys()
    assert type(model).__name__ == "LlamaForCausalLM"
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, logits)
    lit_fused.unfuse(model)
    assert not {"forward", "fused_forward", "_replicate_for_data_parallel"} & model.__dict__.keys()
    assert model(**BATCH).logits is not None


def _pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled, _saved])
def test_a_copy_is_fused_and_trains_its_own_weights(model, copied, used):
    lit_fused.fuse(model)
    if used:
        model(**BATCH)
    twin = copied(model)
    with torch.no_grad():
        twin.lm_head.weight.mul_(2)
    expected = model(**BATCH).loss
    answer = twin(**BATCH)
    assert not isinstance(answer.logits, Tensor)
    answer.loss.backward()
    assert twin.lm_head.weight.grad is not None
    assert model.lm_head.weight.grad is None
    torch.testing.assert_close(answer.loss, lit_fused.unfuse(twin)(**BATCH).loss)
    assert not torch.allclose(answer.loss, expected)


LORA = LoraConfig(target_modules=["q_proj", "lm_head"], r=4, init_lora_weights=False)
WHOLE_HEAD = LoraConfig(target_modules=["q_proj"], r=4, modules_to_save=["lm_head"])


PREFIXES = partial(PrefixTuningConfig, num_virtual_tokens=3)
PREFIX = PREFIXES(task_type="CAUSAL_LM")  # a cache, which the model writes into


@pytest.mark.parametrize("config", [LORA, WHOLE_HEAD, PREFIX])
@pytest.mark.parametrize("order", ["fuse first", "adapters first", "fused and used first"])
def test_adapters_also_on_the_head_train_as_without_fuse(order, config):
    own = get_peft_model(tiny("llama"), config)
    state = own.state_dict()
    model = tiny("llama")
    if order != "adapters first":
        lit_fused.fuse(model)
    if order == "fused and used first":
        model(**BATCH)
    adapted = get_peft_model(model, config)
    adapted.load_state_dict(state)
    if order == "adapters first":
        assert lit_fused.fuse(adapted) is adapted
    truth = loss_and_gradients(copy.deepcopy(own).double(), **BATCH)
    assert_as_exact(loss_and_gradients(adapted, **BATCH), loss_and_gradients(own, **BATCH), truth)
    assert not isinstance(adapted(**BATCH).logits, Tensor)


@pytest.mark.parametrize("kind", [partial(LoraConfig, target_modules=["q", "q_proj"]), PREFIXES])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_adapters_of_an_encoder_decoder_train_as_without_fuse(name, kind):
    own = get_peft_model(tiny_seq2seq(name), kind(task_type="SEQ_2_SEQ_LM"))  # It passes None for what it lacks.
    ids = torch.randint(4, VOCABULARY, (2, 2, 9))
    compare(own, input_ids=ids[0], labels=ids[1].index_fill(1, torch.arange(7, 9), -100))


@pytest.mark.filterwarnings("ignore:.*bitsandbytes:UserWarning")
def test_adapters_on_layers_of_4_bits_train_also_after_an_evaluation():
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def adapted() -> nn.Module:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))
        attention: Any = model.get_submodule("model.layers.0.self_attn")
        quantised = bitsandbytes.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        quantised.load_state_dict(attention.o_proj.state_dict())
        attention.o_proj = quantised.to("cpu")
        return get_peft_model(model, LoraConfig(target_modules=["v_proj"], r=4, init_lora_weights=False))

    own, fused = loss_and_gradients(adapted(), **BATCH), lit_fused.fuse(adapted())
    for _ in range(2):
        found = loss_and_gradients(fused, **BATCH)
        assert max(errors(found, own).values()) <= 1e-5
        with torch.no_grad():
            fused.eval()(**BATCH)
        fused.train()


def test_an_adapter_for_each_row_is_refused_on_the_head_alone():
    names = ["default", "__base__", "default"]
    for config in (LORA, LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False)):
        own = get_peft_model(tiny("llama"), config).eval()
        expected = own(**BATCH, adapter_names=names).loss
        fused = lit_fused.fuse(own)
        if config is LORA:
            with pytest.raises(lit_fused.UserError, match=r"does something to its logits.*train this model unfused"):
                fused(**BATCH, adapter_names=names)
        else:
            torch.testing.assert_close(fused(**BATCH, adapter_names=names).loss, expected)


def test_gradient_checkpointing_and_dropout_draw_the_same_numbers():
    model = tiny("gpt2", resid_pdrop=0.3).train()
    model.gradient_checkpointing_enable()

    def drawn() -> dict[str, Tensor]:
        torch.manual_seed(3)
        return loss_and_gradients(model, **BATCH)

    own = drawn()
    lit_fused.fuse(model)
    assert_as_exact(drawn(), own, own)
    assert_as_exact(drawn(), own, own)


@pytest.mark.parametrize("compile", ["fuse first", "compile first", "in place"])
@pytest.mark.needs_compiler
@pytest.mark.slow
def test_a_compiled_model_gives_the_same(model, compile):
    truth, own = loss_and_gradients(copy.deepcopy(model).double(), **BATCH), loss_and_gradients(model, **BATCH)
    compiled: Any
    if compile == "in place":
        lit_fused.fuse(model).compile()
        compiled = model
    elif compile == "fuse first":
        compiled = torch.compile(lit_fused.fuse(model))
    else:
        compiled = torch.compile(model)
        lit_fused.fuse(compiled)
    found = loss_and_gradients(compiled, **BATCH)
    found = {name.removeprefix("_orig_mod."): value for name, value in found.items()}
    assert_as_exact(found, own, truth)
    assert not isinstance(compiled(**BATCH).logits, Tensor)
    ids = BATCH["input_ids"]
    torch.testing.assert_close(compiled(input_ids=ids).logits, copy.deepcopy(lit_fused.unfuse(model))(ids).logits)


def test_a_loss_of_another_kind_is_used_or_refused(model):
    smoothed = LinearCrossEntropyLoss(label_smoothing=0.2)
    logits = model(BATCH["input_ids"]).logits[:, :-1].flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, BATCH["labels"][:, 1:].flatten(), label_smoothing=0.2)
    torch.testing.assert_close(lit_fused.fuse(model, loss=smoothed)(**BATCH).loss, expected)
    own = lit_fused.unfuse(model)(**BATCH).loss
    torch.testing.assert_close(lit_fused.fuse(model, loss="lit_fused.filtered.linear_cross_entropy")(**BATCH).loss, own)
    for wrong, message in [
        (CrossEntropyLoss(), "fuse takes a loss without logits, got CrossEntropyLoss"),
        ("chunkd", "chunkd"),
        (3, "loss must be a lit_fused loss"),
    ]:
        with pytest.raises(lit_fused.UserError, match=re.escape(message)):
            lit_fused.fuse(tiny("llama"), loss=wrong)


def test_the_code_of_the_page_runs_as_it_stands():
    page = (Path(__file__).parents[2] / "docs" / "your_own_loop.md").read_text()
    namespace: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), namespace)
    assert namespace["logits"].shape == (2, 16, 1000)


class AddsAKey(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        output: Any = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        output["pooled"] = output.logits.new_zeros(3)
        return output


def test_keys_that_a_model_adds_to_its_output_are_in_the_answer():
    config: Any = tiny("llama").config
    model: Any = lit_fused.fuse(AddsAKey(config))
    assert torch.equal(model(**BATCH).pooled, torch.zeros(3))
