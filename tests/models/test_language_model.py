"""A backbone and a loss in one forward pass: capture in training, equality with logits, plain modules."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import loss_and_gradients
from errors_of import assert_as_near
from shapes_seen import shapes
from tiny_models import (
    MODELS,
    VOCABULARY,
    WIDTH,
    TinyBackbone,
    sharpen,
    tiny_backbone,
    tiny_batch,
    tiny_llama,
    tiny_model,
)
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_fused import LanguageModel
from lit_fused.errors import UserError
from lit_fused.heads.probe import output_layer
from lit_fused.losses import CrossEntropyLoss, LinearCrossEntropyLoss

CPU = torch.device("cpu")


def fused(backbone: nn.Module, **options: Any) -> LanguageModel:
    model = LanguageModel(backbone, LinearCrossEntropyLoss(**options))
    model.prepare(CPU)
    return model


def shifted_cross_entropy(backbone: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The definition: logits, upcast, and the cross entropy of each label with the position before it."""
    logits = backbone(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)), batch["labels"][:, 1:].flatten()
    )


# Equality with logits, over architectures

QUICK = {"llama", "gemma2", "bert"}


@pytest.mark.parametrize("tied", [None, True, False])
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in MODELS])
def test_loss_and_every_gradient_are_those_of_the_logits(name, tied):
    changes = {} if tied is None else {"tie_word_embeddings": tied}
    changes |= {"output_router_logits": False} if "output_router_logits" in MODELS[name][1] else {}
    backbone = sharpen(tiny_model(name, **changes), 5.0).eval()
    batch = tiny_batch()
    exact = copy.deepcopy(backbone).double()

    truth = loss_and_gradients(exact, shifted_cross_entropy(exact, batch))
    standard = loss_and_gradients(backbone, shifted_cross_entropy(backbone, batch))
    ours = loss_and_gradients(backbone, fused(backbone)(batch).loss)
    assert_as_near(ours, standard, truth, 4 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi", "granite"])
def test_in_bf16_errors_are_at_most_twice_those_of_the_upcast_standard(name):
    backbone = sharpen(tiny_model(name, torch.bfloat16), 5.0).eval()
    batch = tiny_batch()
    exact = copy.deepcopy(backbone).double()
    truth = loss_and_gradients(exact, shifted_cross_entropy(exact, batch))
    standard = loss_and_gradients(backbone, shifted_cross_entropy(backbone, batch))
    ours = loss_and_gradients(backbone, fused(backbone)(batch).loss)
    assert_as_near(ours, standard, truth, torch.finfo(torch.bfloat16).eps / 16)


@pytest.mark.parametrize("name", ["llama", "qwen3_tied", "gemma2", "phi", "bert"])
def test_a_float32_model_under_bf16_autocast_keeps_float32_gradients_and_loss(name):
    backbone = sharpen(tiny_model(name), 5.0).eval()
    batch = tiny_batch()
    truth = loss_and_gradients(backbone, shifted_cross_entropy(backbone, batch))
    model = fused(backbone)
    with torch.autocast("cpu", torch.bfloat16):
        standard = shifted_cross_entropy(backbone, batch)
        ours = model(batch).loss
    standard, ours = loss_and_gradients(backbone, standard), loss_and_gradients(backbone, ours)
    assert {value.dtype for value in ours.values()} == {torch.float32}
    assert_as_near(ours, standard, truth, torch.finfo(torch.bfloat16).eps / 16)


# The tests below show what training neither builds nor leaves behind.


def of_all_tokens_by_the_vocabulary(seen: set[tuple[int, ...]], tokens: int) -> set[tuple[int, ...]]:
    return {s for s in seen if s[-1:] == (VOCABULARY,) and torch.Size(s).numel() >= tokens * VOCABULARY}


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma2", "cohere", "phi", "bert", "mixtral"])
def test_neither_model_nor_loss_builds_logits_in_training_or_evaluation(name):
    model = fused(tiny_model(name))
    length, sequences = 60, 10  # 600 tokens: more than one chunk of the smallest size
    batch = tiny_batch(sequences, length, ignored=0.0)
    sizes: list[int] = []
    model.backbone.register_forward_hook(lambda _, __, output: sizes.append(output.logits.numel()))
    with shapes() as seen:
        model(batch).loss.backward()
        with torch.no_grad():
            model.eval()(batch)
            model.token_losses(batch)
    assert sizes == [VOCABULARY] * 3, "one row"
    assert not of_all_tokens_by_the_vocabulary(seen, sequences * (length - 1))

    with shapes() as seen:
        LanguageModel(model.backbone, CrossEntropyLoss())(batch)
    assert of_all_tokens_by_the_vocabulary(seen, sequences * length), "the check sees the logits of the standard loss"


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(name, use_reentrant):
    backbone = tiny_model(name)
    batch = tiny_batch()
    plain = loss_and_gradients(backbone, fused(backbone)(batch).loss)
    backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    again = loss_and_gradients(backbone, fused(backbone)(batch).loss)
    assert again.keys() == plain.keys()
    assert all(torch.equal(again[key], plain[key]) for key in plain)


def test_a_head_that_the_backend_cannot_serve_is_refused_when_the_model_is_prepared():
    with pytest.raises(UserError, match="loss=torch_native has no softcap, which the output layer"):
        fused(tiny_model("gemma2"), impl="torch_native")
    with pytest.raises(UserError, match="loss=cce has no bias, which the output layer"):
        fused(tiny_model("phi"), impl="cce")
    with pytest.raises(UserError, match="loss=liger cannot run here"):
        fused(tiny_model("llama"), impl="liger")


def test_weights_replaced_after_preparation_are_those_that_train():
    model = fused(tiny_model("llama"))
    head: Any = model.backbone.get_submodule("lm_head")
    head.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
    output = model(tiny_batch())
    torch.testing.assert_close(output.loss, shifted_cross_entropy(model.backbone, tiny_batch()))
    output.loss.backward()
    assert head.weight.grad is not None
    assert head.weight.grad.norm() > 0


# Backbones that are no transformers models


class ReturnsDict(TinyBackbone):
    def forward(self, input_ids: Tensor) -> Any:
        return {"last_hidden_state": super().forward(input_ids)}


class ReturnsTuple(TinyBackbone):
    def forward(self, input_ids: Tensor) -> Any:
        return super().forward(input_ids), None


class RunsItsHead(TinyBackbone):
    def forward(self, input_ids: Tensor) -> Any:
        return self.get_output_embeddings()(super().forward(input_ids))


class ReturnsLogits(TinyBackbone):
    def forward(self, input_ids: Tensor) -> Any:
        return super().forward(input_ids) @ self.get_output_embeddings().weight.T


class ReturnsLogitsByName(ReturnsLogits):
    def forward(self, input_ids: Tensor) -> Any:
        return {"logits": super().forward(input_ids)}


@pytest.mark.parametrize("loss", [LinearCrossEntropyLoss(), LinearCrossEntropyLoss("torch_native"), CrossEntropyLoss()])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("backbone_class", [TinyBackbone, ReturnsDict, ReturnsTuple])
def test_a_plain_module_trains_with_its_linear_or_tied_output_layer(backbone_class, tied, loss):
    backbone = tiny_backbone(backbone_class, tied=tied)
    batch = tiny_batch()
    hidden = TinyBackbone.forward(backbone, batch["input_ids"])
    layer = backbone.get_output_embeddings()
    logits = F.linear(hidden, layer.weight, getattr(layer, "bias", None))
    expected = loss_and_gradients(
        backbone, F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    )
    model = LanguageModel(backbone, loss)
    model.prepare(CPU)
    found = loss_and_gradients(backbone, model(batch).loss)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6)
    assert model.vocabulary == VOCABULARY


@pytest.mark.parametrize("tied", [False, True])
def test_a_plain_module_that_returns_logits_is_told_to_return_hidden_states(tied):
    model = fused(tiny_backbone(ReturnsLogits, tied=tied))
    with pytest.raises(
        UserError, match=r"\(3, 20, 97\) do not fit .*\(97, 32\).*pass the input of that very output layer"
    ):
        model(tiny_batch())
    model = fused(tiny_backbone(ReturnsLogitsByName, tied=tied))
    with pytest.raises(
        UserError, match=r"ReturnsLogitsByName returned dict with \['logits'\], in which no hidden states"
    ):
        model(tiny_batch())


def test_a_plain_module_that_runs_its_own_head_is_told_to_return_the_heads_input():
    model = fused(tiny_backbone(RunsItsHead))
    with pytest.raises(
        UserError, match="RunsItsHead runs its output layer in its own forward; return the hidden states"
    ):
        model(tiny_batch())
    assert model.backbone(tiny_batch()["input_ids"]).shape == (3, 20, VOCABULARY)


def with_new_layer(backbone: Any) -> None:
    layer = nn.Linear(WIDTH, VOCABULARY, bias=False)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(5))
    if isinstance(backbone, PreTrainedModel):
        backbone.set_output_embeddings(layer)
    else:
        backbone.head = layer


@pytest.mark.parametrize("build", [tiny_llama, tiny_backbone])
def test_a_layer_that_takes_the_place_of_the_output_layer_is_the_one_that_is_trained(build):
    model = LanguageModel(build(), LinearCrossEntropyLoss())
    model(tiny_batch()).loss.backward()
    with_new_layer(model.backbone)
    found, expected = model(tiny_batch()).loss, LanguageModel(model.backbone, CrossEntropyLoss())(tiny_batch()).loss
    torch.testing.assert_close(found, expected)
    model.zero_grad()
    found.backward()
    assert output_layer(model.backbone).weight.grad.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_that_was_trained_is_trained_alone(again):
    model = LanguageModel(tiny_llama(), LinearCrossEntropyLoss())
    model(tiny_batch()).loss.backward()
    model.zero_grad()
    other = again(model)
    found, expected = (loss_and_gradients(m, m(tiny_batch()).loss) for m in (other, model))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with torch.no_grad():
        other.backbone.lm_head.weight.mul_(2)
    model.zero_grad()
    assert torch.equal(model(tiny_batch()).loss, expected["loss"])
    assert not torch.equal(other(tiny_batch()).loss, expected["loss"])
