"""reduce_memory beside torch.compile of layers."""

import copy

import pytest
import torch
from lightning_helpers import loader, quiet_trainer
from tiny_models import tiny_batch, tiny_model
from torch._dynamo.utils import counters

import lit_fused
from lit_fused.memory.offloaded_layer import CheckpointedLayer
from lit_fused.models.compilation import compile_backbone, take_back

pytestmark = [pytest.mark.slow, pytest.mark.needs_compiler, pytest.mark.usefixtures("fresh_compiler")]


@pytest.mark.parametrize("checkpointing", ["none", "recompute", "offload"])
@pytest.mark.parametrize("tokens", [None, 5])
@pytest.mark.parametrize("how", ["regional", "where possible"])
def test_layers_are_compiled_once_and_train_as_plain_ones(checkpointing, tokens, how, tmp_path):
    batch = tiny_batch()
    plain = tiny_model("llama", num_hidden_layers=4)
    model = lit_fused.reduce_memory(copy.deepcopy(plain), checkpointing=checkpointing, mlp_chunk_tokens=tokens)
    compiled = lit_fused.FusedCausalLMModule(model.train(), check_every_n_steps=0)
    parts = compile_backbone(compiled.model, how)
    assert compiled.model.is_compiled
    assert (type(parts[0]) is CheckpointedLayer) == (checkpointing == "offload")
    quiet_trainer(tmp_path, max_steps=3).fit(compiled, loader([batch]))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    quiet_trainer(tmp_path, max_steps=3).fit(lit_fused.FusedCausalLMModule(plain.train()), loader([batch]))
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-5), name
    with torch.no_grad():
        compiled.model.eval()(batch)
    assert counters["stats"]["unique_graphs"] > 1, "evaluation is compiled as well"
    take_back(parts)
    assert not compiled.model.is_compiled
