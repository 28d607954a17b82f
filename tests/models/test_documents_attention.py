"""Packed rows on a GPU: FlexAttention keeps documents apart, as exactly as masks do, and nothing else changes."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from packing_cases import mamba, row
from tiny_models import tiny_batch, tiny_model
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedModel

from lit_fused import LanguageModel, LinearCrossEntropyLoss
from lit_fused.models import documents_attention
from lit_fused.models.compilation import compile_backbone
from lit_fused.models.documents_attention import NAME, EmptyCache, empty_cache_for, is_possible, takes_its_place

GPU = torch.device("cuda")
ROWS = ((9, 20, 3), (16, 16), (32,), (1, 1, 30))  # lengths of documents
SHAPES = {  # names of tiny models with heads of 16, and what else is changed
    "llama": ("llama", {"head_dim": 16}),
    "mistral": ("mistral", {"head_dim": 16, "sliding_window": 6}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gpt_neox": ("gpt_neox", {"num_attention_heads": 2}),
}


def rows(*lengths: tuple[int, ...]) -> dict[str, Tensor]:
    made = [row(*part) for part in lengths]
    return {name: torch.cat([part[name] for part in made]) for name in made[0]}


def backbone(name: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> PreTrainedModel:
    kind, others = SHAPES[name]
    return tiny_model(kind, dtype, **others | changes)


def fused(name: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> LanguageModel:
    return LanguageModel(backbone(name, dtype, **changes), LinearCrossEntropyLoss())


def implementation(model: LanguageModel) -> str | None:
    assert model.transformers_model is not None
    return model.transformers_model.config._attn_implementation


@pytest.fixture
def as_on_a_gpu(monkeypatch) -> Iterator[None]:
    """Choose as on a GPU, and compile nothing: FlexAttention's own forward pass runs on a CPU."""
    possible = documents_attention.is_possible
    monkeypatch.setattr(documents_attention, "is_possible", lambda model, _: possible(model, GPU))
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("name", SHAPES)
def test_documents_in_blocks_have_the_loss_that_masks_give(name, as_on_a_gpu, monkeypatch):
    seen, forward = [], documents_attention.flex_attention_forward

    def watched(*given: Any, **named: Any) -> Any:
        seen.append(given[4])
        return forward(*given, **named)

    monkeypatch.setattr(documents_attention, "flex_attention_forward", watched)
    blocks, masks, truth = fused(name), fused(name), fused(name, torch.float64)
    masks.packing = truth.packing = "positions"
    batch = rows(*ROWS)
    with torch.no_grad():
        found, usual, exact = (model(batch).loss.double() for model in (blocks, masks, truth))
    assert (blocks.packing, implementation(blocks), implementation(masks)) == ("blocks", NAME, "sdpa")
    assert {type(mask) for mask in seen} == {BlockMask}
    assert (found - exact).abs() <= 2 * (usual - exact).abs() + 1e-3 * exact


def test_what_has_no_documents_is_computed_as_before(as_on_a_gpu, tmp_path):
    ours, usual = fused("mistral"), fused("mistral")
    with torch.no_grad():
        ours(rows(*ROWS))
    assert implementation(ours) == NAME
    padded = tiny_batch()
    padded["attention_mask"] = torch.ones_like(padded["input_ids"])
    padded["attention_mask"][0, -3:] = 0
    for batch in (tiny_batch(), padded):
        losses = [model(batch).loss for model in (ours, usual)]
        for loss in losses:
            loss.backward()
        assert losses[0].equal(losses[1])
        gradients = [[p.grad for p in model.parameters()] for model in (ours, usual)]
        assert all(mine.equal(theirs) for mine, theirs in zip(*gradients, strict=True))
    prompt = {"input_ids": tiny_batch()["input_ids"][:, :5], "max_new_tokens": 12, "do_sample": False}
    generated = [model.eval().run_with(lambda model: model.backbone.generate(**prompt)) for model in (ours, usual)]
    assert generated[0].equal(generated[1])
    assert ours.transformers_model is not None
    ours.transformers_model.save_pretrained(tmp_path)
    assert NAME not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "mixtral"])
def test_a_batch_without_positions_is_not_searched_for_documents_and_its_numbers_stay(name):
    ours, usual = (LanguageModel(tiny_model(name), LinearCrossEntropyLoss()) for _ in range(2))
    ours.prepare(torch.device("cpu"))
    assert isinstance(ours.inputs_of(tiny_batch())["past_key_values"], EmptyCache)
    losses = [model(tiny_batch()).loss for model in (ours, usual)]
    for loss in losses:
        loss.backward()
    assert losses[0].equal(losses[1])
    gradients = [[p.grad for p in model.parameters() if p.grad is not None] for model in (ours, usual)]
    assert all(mine.equal(theirs) for mine, theirs in zip(*gradients, strict=True))
    packed, apart = rows((9, 11)), ours(rows((9, 11))).loss
    assert "past_key_values" not in ours.inputs_of(packed)
    assert apart.equal(usual(packed).loss)


@pytest.mark.parametrize("build", [lambda: tiny_model("falcon_h1"), mamba])
def test_a_model_with_a_cache_of_its_own_kind_gets_no_empty_one(build):
    assert empty_cache_for(build().eval()) is None


@pytest.mark.parametrize("size", [8, 144])
def test_heads_that_flexattention_does_not_have_are_left_to_masks(size, as_on_a_gpu):
    model = fused("qwen3", head_dim=size)
    with torch.no_grad():
        model(rows(*ROWS))
    assert model.packing == "positions"


def test_flexattention_is_for_gpus_in_half_precision_without_dropout():
    half, single, eager = backbone("llama"), backbone("llama", torch.float32), backbone("llama")
    assert is_possible(half, GPU)
    assert not is_possible(half, torch.device("cpu"))
    assert not is_possible(single, GPU)
    assert not is_possible(backbone("llama", attention_dropout=0.1), GPU)
    eager.set_attn_implementation("eager")
    assert takes_its_place(half)
    assert not takes_its_place(eager)


def gradients(model: LanguageModel, batch: dict[str, Tensor]) -> Tensor:
    model(batch).loss.backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "size", "how"),
    [
        ("mistral", 16, "none"),
        ("mistral", 16, "whole"),
        ("mistral", 128, "regional"),
        ("qwen3", 80, "none"),
        ("qwen3", 128, "whole"),
    ],
)
def test_gradients_of_documents_in_blocks_are_as_near_to_float64_as_those_of_masks(name, size, how):
    batch = {name: part.to(GPU) for name, part in rows((90, 200, 30), (320,), (1, 1, 318), (160, 160)).items()}
    blocks, masks, truth = (
        fused(name, dtype, head_dim=size).to(GPU) for dtype in (torch.bfloat16,) * 2 + (torch.float64,)
    )
    masks.packing = truth.packing = "positions"
    compile_backbone(blocks, how)
    found, usual, exact = (gradients(model, batch) for model in (blocks, masks, truth))
    assert blocks.packing == "blocks"
    assert (found - exact).norm() <= 2 * (usual - exact).norm()


@pytest.mark.gpu
def test_checkpointed_layers_see_the_same_documents_again():
    batch = {name: part.to(GPU) for name, part in rows((90, 200, 30), (320,)).items()}
    plain, checkpointed = fused("qwen3").to(GPU), fused("qwen3").to(GPU)
    assert checkpointed.transformers_model is not None
    checkpointed.transformers_model.gradient_checkpointing_enable()
    found, usual = (gradients(model, batch) for model in (checkpointed, plain))
    assert checkpointed.packing == plain.packing == "blocks"
    assert (found - usual).norm() <= 1e-2 * usual.norm()


@pytest.mark.gpu
def test_under_autocast_documents_are_in_blocks_too():
    batch = {name: part.to(GPU) for name, part in rows((90, 200, 30), (320,)).items()}
    model, masks, truth = (fused("qwen3", dtype).to(GPU) for dtype in (torch.float32, torch.float32, torch.float64))
    masks.packing = truth.packing = "positions"
    with torch.autocast("cuda", torch.bfloat16):
        found, usual = (gradients(model, batch) for model in (model, masks))
    assert model.packing == "blocks"
    assert (found - gradients(truth, batch)).norm() <= 2 * (usual - gradients(truth, batch)).norm()
