"""Units of FSDP2: small layers of a decoder are gathered together, and train as one process does."""

from itertools import chain
from typing import Any
from unittest import mock

import architectures
import pytest
import torch
from errors_of import relative_error
from parallel_cases import as_strategy
from ranks import Refusal, each
from tiny_models import tiny_model
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from vision_cases import tiny

from lit_fused import LanguageModel, LinearCrossEntropyLoss
from lit_fused.models.blocks import blocks
from lit_fused.parallel import sharded

TOKENS = torch.arange(24).view(2, 12)
OF_TWO_LAYERS = 10_000  # parameters; a layer of the tiny Llama has some 7,700


def sizes(model: nn.Module) -> list[int]:
    return [len(unit) for unit in sharded.units(LanguageModel(model, LinearCrossEntropyLoss()))]


def shape(**options: Any) -> nn.Module:
    heads = {"head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 8}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **heads, **options))


def test_a_unit_has_as_many_neighbouring_layers_as_are_worth_a_gathering():
    small = shape(hidden_size=1024, intermediate_size=3072, num_hidden_layers=6)
    assert sizes(small) == [4, 2]
    assert sizes(shape(hidden_size=2048, intermediate_size=6144, num_hidden_layers=3)) == [1, 1, 1]
    grouped = sharded.units(LanguageModel(small, LinearCrossEntropyLoss()))
    assert [*chain.from_iterable(grouped)] == blocks(small)


@pytest.mark.parametrize("kind", ["drops layers", "layers of images", "no transformers model"])
def test_layers_that_may_not_all_run_in_order_are_units_of_their_own(kind):
    if kind == "drops layers":
        model: Any = tiny_model("llama")
        model.config.layerdrop = 0.1
    elif kind == "layers of images":
        model = tiny("llava")
    else:
        model = nn.Module()
        model.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        model.lm_head = nn.Linear(4, 9)
    assert set(sizes(model)) == {1}


def built(kind: str) -> LanguageModel:
    torch.manual_seed(0)
    backbone: Any = tiny_model("llama", num_hidden_layers=5)
    if kind == "activation checkpointing":
        backbone.gradient_checkpointing_enable()
    if kind == "two layers left out":
        backbone.config.num_hidden_layers = 3
    model = LanguageModel(backbone.train(), LinearCrossEntropyLoss())
    model.prepare(torch.device("cpu"))
    return model


def gradients_of(model: LanguageModel, batch: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(batch or {"input_ids": TOKENS, "labels": TOKENS}).loss_sum.backward()
    found = {}
    for name, p in model.named_parameters():
        gradient = torch.zeros(p.shape) if p.grad is None else p.grad
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
    return found


def counted(collective: Any) -> Any:
    return mock.patch.object(collective, "__call__", autospec=True, side_effect=collective.__call__)


def train(kind: str) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Return how often a second step gathered and reduced, and the gradients of a third."""
    sharded._ENOUGH = OF_TWO_LAYERS
    model, kept = built(kind), kind == "kept until backward"
    sharded.Sharded(as_strategy(reshard_after_forward=not kept))._divide(model)
    gradients_of(model)
    with counted(DefaultAllGather) as gathered, counted(DefaultReduceScatter) as reduced:
        model({"input_ids": TOKENS, "labels": TOKENS}).loss_sum.backward()
    return [gathered.call_count, reduced.call_count], gradients_of(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["as it comes", "activation checkpointing", "two layers left out", "kept until backward"]
)
def test_units_of_several_layers_train_as_one_process_and_gather_once_each(kind):
    counts, found = each(train, 2, [kind], timeout=60)[kind]
    for name, gradient in gradients_of(built(kind)).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)
    units, root = 3, 1  # of two, two and one layers; the root stays whole between forward and backward
    units -= kind == "two layers left out"
    gathered = units if kind == "kept until backward" else 2 * units
    assert counts == [gathered + root, units + root]


def of(architecture: str) -> tuple[LanguageModel, dict[str, Any]]:
    """Return an architecture's tiny model in evaluation mode, and a batch for it."""
    entry, is_masked = architectures.Entry(*architecture.rsplit("-", 1)), architecture.endswith("masked")
    backbone = architectures.tiny_model(entry)
    architectures.sharpen(backbone)
    model = architectures.language_model(backbone, masked=is_masked)
    model.prepare(torch.device("cpu"))
    return model.eval(), architectures.tiny_batch(backbone, masked=is_masked)


def train_architecture(name: str) -> dict[str, torch.Tensor]:
    """Return the gradients of a second backward pass."""
    model, batch = of(name)
    sharded.Sharded(as_strategy())._divide(model)
    gradients_of(model, batch)
    return gradients_of(model, batch)


def judge(names: list[str], timeout: float = 60) -> None:
    for name, gradients in each(train_architecture, 2, names, timeout=timeout).items():
        assert not isinstance(gradients, Refusal), gradients
        assert relative_error(gradients, gradients_of(*of(name))) < 1e-5, name


@pytest.mark.slow
def test_layers_that_share_a_part_and_lists_of_lists_train_as_one_process():
    names = ["zamba2-causal", "funnel-masked"]
    for name in names:
        model, _ = of(name)
        shared = [layer for layer in blocks(model.backbone) if type(layer).__name__ == "Zamba2HybridLayer"]
        assert (len(shared) > 1) == (name == "zamba2-causal")
        units = [*chain.from_iterable(sharded.units(model))]
        assert units
        assert not any(layer in shared or isinstance(layer, nn.ModuleList) for layer in units)
    judge(names)


@pytest.mark.slow
def test_an_architecture_of_each_kind_trains_as_one_process():
    names = sorted(architectures.OF_EACH_KIND - {"mobilebert-masked", "musicgen-causal"})  # They are refused.
    assert len(names) > 15
    judge(names, timeout=200)
