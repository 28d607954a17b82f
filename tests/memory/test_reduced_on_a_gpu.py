"""reduce_memory on a GPU: the copies beside the computation, and the memory that they spare."""

import copy
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor

import lit_fused
from lit_fused.memory import host_inputs

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


def step(model: Any, ids: Tensor) -> tuple[dict[str, Tensor], int]:
    model.train().zero_grad()
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("piece", [2**26, 2**12])
def test_gradients_are_those_of_recomputed_layers_to_the_bit_in_many_steps(piece, monkeypatch):
    monkeypatch.setattr(host_inputs, "_PIECE", piece)
    plain: Any = tiny_model("gpt2", n_layer=8, n_positions=512, resid_pdrop=0.1, attn_pdrop=0.0, embd_pdrop=0.0)
    plain.to(GPU)
    model = lit_fused.reduce_memory(copy.deepcopy(plain), checkpointing="offload")
    lit_fused.reduce_memory(plain, checkpointing="recompute")
    for _ in range(5):
        ids = torch.randint(3, 97, (4, 400), device=GPU)
        expected, found = step(plain, ids)[0], step(model, ids)[0]
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_more_layers_take_no_more_memory_for_their_inputs():
    ids = torch.randint(3, 97, (1, 8192), device=GPU)

    def peak(layers: int, checkpointing: str) -> int:
        model: Any = tiny_model("llama", num_hidden_layers=layers, max_position_embeddings=8192)
        model.to(GPU)
        lit_fused.fuse(lit_fused.reduce_memory(model, checkpointing=checkpointing), compile="none")
        step(model, ids)
        weights = sum(p.nbytes for p in model.parameters())
        return step(model, ids)[1] - weights

    one = 8192 * 32 * 4
    assert peak(24, "recompute") - peak(8, "recompute") > 14 * one
    assert peak(24, "offload") - peak(8, "offload") < 2 * one
