"""A backbone under ``torch.compile``: whole, in place or layer by layer, the captured head included.

The backend ``aot_eager`` traces forward and backward as the real one does, without compiling kernels.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from head_cases import grad_of
from lightning_helpers import loader, quiet_trainer, ragged_batches
from logits_changes import CASES, outcome
from tiny_models import tiny_batch, tiny_model
from torch import nn
from torch._dynamo.utils import counters
from transformers import masking_utils

from lit_fused import FusedCausalLMModule, LanguageModel, LinearCrossEntropyLoss


def whole(model: Any, **options: Any) -> nn.Module:
    return torch.compile(model, backend="aot_eager", **options)  # type: ignore[return-value]


def in_place(model: Any, **options: Any) -> nn.Module:
    model.compile(backend="aot_eager", **options)
    return model


def layer_by_layer(model: Any, **options: Any) -> nn.Module:
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", **options)
    return model


WAYS = [whole, in_place, layer_by_layer]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("llama", in_place),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gemma2", whole), ("granite", whole))),
        *(pytest.param(name, layer_by_layer, marks=pytest.mark.slow) for name in ("llama", "gemma2")),
    ],
)
def test_loss_and_gradients_are_those_of_the_backbone_without_compilation(name, way: Callable[..., nn.Module]):
    plain = tiny_model(name)
    inner = copy.deepcopy(plain)
    expected = LanguageModel(plain, LinearCrossEntropyLoss())(tiny_batch()).loss
    expected.backward()

    model = LanguageModel(way(inner, fullgraph=True), LinearCrossEntropyLoss())  # fullgraph: a graph break is an error
    model.prepare(torch.device("cpu"))
    model.spot_check(tiny_batch())
    assert not counters["stats"], "nothing is compiled for the probes"
    found = model(tiny_batch()).loss
    found.backward()

    rounding = 16 * torch.finfo(torch.float32).eps
    whole_gradient = torch.stack([grad_of(p).norm() for p in plain.parameters()]).norm()
    assert abs(found - expected) <= rounding * expected
    for (key, p), q in zip(plain.named_parameters(), inner.parameters(), strict=True):
        assert p.grad is not None, key
        assert q.grad is not None, key
        assert (p.grad - q.grad).norm() <= rounding * whole_gradient, key


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_further_steps_use_the_graph_of_the_first(way):
    backbone = tiny_model("llama")
    model = LanguageModel(way(backbone, fullgraph=True), LinearCrossEntropyLoss())
    model(tiny_batch()).loss.backward()
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == {whole: 1, in_place: 1, layer_by_layer: 1}[way]
    for _ in range(4):
        model(tiny_batch()).loss.backward()
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("way", [whole, *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:])])
def test_a_compiled_backbone_trains_generates_and_is_saved_under_the_names_that_it_has_without(way, tmp_path):
    plain = tiny_model("llama")
    module = FusedCausalLMModule(way(copy.deepcopy(plain)))
    trainer = quiet_trainer(tmp_path, max_steps=3)
    trainer.fit(module, loader(ragged_batches(3)))
    assert module.state_dict().keys() == FusedCausalLMModule(plain).state_dict().keys()
    trained: Any = copy.deepcopy(plain)
    trained.load_state_dict({k.removeprefix("model.backbone."): v for k, v in module.state_dict().items()})
    assert not torch.equal(trained.lm_head.weight, plain.lm_head.weight)
    prompt = tiny_batch()["input_ids"][:1, :5]
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(module.generate(prompt, **options), trained.eval().generate(prompt, **options))
    assert torch.equal(module.backbone.eval()(prompt).logits, trained(prompt).logits)


def is_causal_as_transformers_5_17_says(mask: Any, *arguments: Any, **named: Any) -> bool:
    return not vars(masking_utils)["is_tracing"](mask) and newest_is_causal(mask, *arguments, **named)


newest_is_causal = masking_utils._ignore_causal_mask_sdpa
OLDER: dict[str, dict[str, Any]] = {
    "the newest versions": {"_ignore_causal_mask_sdpa": newest_is_causal},
    "torch 2.11": {"is_torchdynamo_exporting": lambda: True},
    "transformers 5.17": {"_ignore_causal_mask_sdpa": is_causal_as_transformers_5_17_says},
}


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "version"), [(1, next(iter(OLDER))), *((3, version) for version in OLDER)])
def test_attention_of_a_model_compiled_as_a_whole_is_causal_without_a_mask_from_the_first_step_on(rows, version):
    graphs: list[Any] = []
    backbone: Any = tiny_model("llama")
    backbone.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True)
    model = LanguageModel(backbone, LinearCrossEntropyLoss())
    model.prepare(torch.device("cpu"))
    with mock.patch.multiple(masking_utils, **OLDER[version]):
        model({key: value[:rows] for key, value in tiny_batch().items()})
    attention = [n for graph in graphs for n in graph.graph.nodes if n.target is F.scaled_dot_product_attention]
    assert len(attention) == backbone.config.num_hidden_layers
    assert all(node.kwargs["attn_mask"] is None and node.kwargs["is_causal"] for node in attention)


CHANGES = {case.what: case for case in CASES}


@pytest.mark.parametrize(
    "change",
    [
        "a hook that halves some entries",
        "logits detached after the first step",
        pytest.param("a hook that changes the head's input", marks=pytest.mark.slow),
        pytest.param("some entries masked in place", marks=pytest.mark.slow),
    ],
)
def test_what_is_compiled_together_with_the_output_layer_is_checked_as_well(change):
    assert outcome(CHANGES[change], compile="eager") == CHANGES[change].outcome
