"""``compile``: the same training, the same names, other code; and what cannot be is refused by name."""

import copy
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning_helpers import loader, quiet_trainer, ragged_batches
from tiny_models import TinyBackbone, tiny_backbone, tiny_batch, tiny_model
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

import lit_fused
from lit_fused import FusedCausalLMModule, LanguageModel, LinearCrossEntropyLoss, UserError
from lit_fused.callbacks import ExportPretrained
from lit_fused.models import compilation
from lit_fused.models.compilation import check_compile, compile_backbone
from lit_fused.parallel import FSDP2Strategy, placement_of
from lit_fused.parallel.sharded import Sharded
from lit_fused.pipeline import PipelineStrategy

CPU = torch.device("cpu")


def fitted(folder: Path, backbone: Any, compile: str, **options: Any) -> FusedCausalLMModule:
    module = FusedCausalLMModule(backbone, compile=compile)
    quiet_trainer(folder, max_steps=3, **options).fit(module, loader(ragged_batches(3)), loader(ragged_batches(1)))
    return module


@pytest.mark.slow
@pytest.mark.needs_compiler
@pytest.mark.parametrize("how", ["regional", "whole"])
def test_a_compiled_run_trains_the_weights_of_a_plain_one_under_their_names(how, tmp_path, fresh_compiler):
    plain = tiny_model("qwen3_tied")
    compiled = fitted(tmp_path, copy.deepcopy(plain), how, callbacks=[ExportPretrained(tmp_path / "out")])
    assert counters["stats"]["unique_graphs"] >= 1
    assert not counters["graph_break"]
    expected = fitted(tmp_path, plain, "none").state_dict()
    found = compiled.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=2e-5), name
    assert (tmp_path / "out" / "model.safetensors").is_file()
    graphs = counters["stats"]["unique_graphs"]
    prompt = tiny_batch()["input_ids"][:1, :4]
    compiled.generate(prompt, max_new_tokens=3, do_sample=False)
    assert counters["stats"]["unique_graphs"] == graphs, "generation has been compiled"


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_layers_that_are_alike_are_compiled_once_and_within_activation_checkpoints(tmp_path, fresh_compiler):
    config = copy.deepcopy(tiny_model("llama").config)
    config.num_hidden_layers = 5
    model = lit_fused.reduce_memory(lit_fused.from_config(config), checkpointing="recompute").train()
    module = FusedCausalLMModule(model, compile="regional", check_every_n_steps=0)
    quiet_trainer(tmp_path, max_steps=3).fit(module, loader([tiny_batch()]))
    assert counters["stats"]["unique_graphs"] == 1
    plain = lit_fused.from_config(config).train()
    quiet_trainer(tmp_path, max_steps=3).fit(FusedCausalLMModule(plain), loader([tiny_batch()]))
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-5), name


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_adapters_are_compiled_with_their_layers_and_merged_into_an_export(tmp_path, fresh_compiler):
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_model("llama"), adapters)
    plain = copy.deepcopy(model)
    for how, backbone in (("regional", model), ("none", plain)):
        fitted(tmp_path, backbone, how).save_pretrained(tmp_path / how)
    a, b = (lit_fused.from_pretrained(tmp_path / how, at_once=True).state_dict() for how in ("regional", "none"))
    assert all(torch.allclose(a[name], b[name], atol=2e-5) for name in b)


@pytest.mark.parametrize(
    ("strategy", "training", "device", "missing", "expected"),
    [
        (SingleDeviceStrategy(), True, "cuda", None, "where possible"),
        (DDPStrategy(), True, "cuda", None, "where possible"),
        (PipelineStrategy(2), True, "cuda", None, "where possible"),
        (SingleDeviceStrategy(), False, "cuda", None, "none"),
        (SingleDeviceStrategy(), True, "cpu", None, "none"),
        (SingleDeviceStrategy(), True, "cuda", "a C compiler", "none"),
    ],
)
def test_layers_are_compiled_by_default_where_a_gpu_trains_and_nothing_is_against_it(
    strategy, training, device, missing, expected, monkeypatch
):
    monkeypatch.setattr(compilation, "compiler_missing", lambda device: missing)
    monkeypatch.setattr(type(strategy), "root_device", property(lambda self: torch.device(device)))
    model = LanguageModel(tiny_model("llama"), LinearCrossEntropyLoss())
    assert placement_of(strategy).compiled_by_default(model, training=training) == expected


def cannot_be_compiled(*_: Any) -> Any:
    raise RuntimeError("this backend compiles nothing")


@pytest.mark.needs_compiler
def test_only_layers_that_nobody_asked_to_compile_run_as_they_are_where_the_compiler_fails(monkeypatch):
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=cannot_be_compiled))
    torch._dynamo.reset()
    plain, asked, tried = (LanguageModel(tiny_model("llama"), LinearCrossEntropyLoss()) for _ in range(3))
    compile_backbone(tried, "where possible")
    compile_backbone(asked, "regional")
    with pytest.warns(
        UserWarning, match="(?s)LlamaDecoderLayer cannot be compiled.*this backend compiles nothing"
    ) as seen:
        assert tried(tiny_batch()).loss == plain(tiny_batch()).loss
    assert (len(seen), tried.is_compiled, asked.is_compiled) == (1, False, True)
    with pytest.raises(BackendCompilerFailed, match="this backend compiles nothing"):
        asked(tiny_batch())
    with pytest.raises(BackendCompilerFailed, match="this backend compiles nothing"):
        torch.compile(lambda x: 2 * x, backend=cannot_be_compiled)(torch.ones(2))


@pytest.mark.needs_compiler
def test_what_cannot_be_compiled_is_refused_by_name(monkeypatch):
    model = LanguageModel(tiny_model("llama"), LinearCrossEntropyLoss())
    check_compile(model, "regional", CPU)
    monkeypatch.setattr(Sharded, "tensor_mesh", None)
    monkeypatch.setattr(PipelineStrategy, "root_device", CPU)
    placement_of(PipelineStrategy(2)).check(model, training=True, compile="regional")
    for how, chosen, message in (
        ("whole", FSDP2Strategy(), "compile=whole would be cut at every layer.*choose compile=regional"),
        ("whole", PipelineStrategy(2), "compile=whole was never tested with .* choose compile=regional"),
    ):
        with pytest.raises(UserError, match=message):
            placement_of(chosen).check(model, training=True, compile=how)
    monkeypatch.setattr(Sharded, "tensor_mesh", "ranks that divide each matrix")
    with pytest.raises(UserError, match="compile=whole was never tested with .* choose compile=regional"):
        placement_of(FSDP2Strategy()).check(model, training=True, compile="whole")
    with pytest.raises(UserError, match="TinyBackbone has no repeated layers"):
        check_compile(LanguageModel(tiny_backbone(TinyBackbone), LinearCrossEntropyLoss()), "regional", CPU)
    compile_backbone(model, "regional")
    with pytest.raises(UserError, match="the model is compiled already"):
        check_compile(model, "whole", CPU)
    with pytest.raises(UserError, match="compile must be one of none, auto, regional, whole, got 'all'"):
        FusedCausalLMModule(tiny_model("llama"), compile="all")
