"""``compile`` and ``kernels``: the same training, the same names, other code; and what cannot be is refused by name."""

import copy
import sys
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from types import MethodType
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
from lit_fused import FusedCausalLMModule, LanguageModel, LinearCrossEntropyLoss, PipelineStrategy, UserError
from lit_fused.callbacks import ExportPretrained
from lit_fused.models import compilation
from lit_fused.models.compilation import check_compile, compile_backbone
from lit_fused.models.liger_kernels import _with_globals, check_kernels, use_liger_kernels
from lit_fused.models.load import materialize
from lit_fused.parallel import FSDP2Strategy, placement, placement_of
from lit_fused.parallel.sharded import Sharded

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def fresh_compiler(monkeypatch) -> Iterator[None]:
    """A backend that traces forward and backward as the real one does, without compiling kernels."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


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
    model = lit_fused.from_config(config, activation_checkpointing=True).train()
    module = FusedCausalLMModule(model, compile="regional", parity_check=False)
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
        (PipelineStrategy(2, schedule="ZBVZeroBubble"), True, "cuda", None, "none"),
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
    assert placement_of(strategy).compiled_by_default(model, training=training, kernels="none") == expected


def test_layers_in_float8_are_compiled_by_default_or_the_run_fails(monkeypatch):
    monkeypatch.setattr(placement, "check_compile", lambda *_: None)
    monkeypatch.setattr(placement, "check_float8", lambda *_: None)
    monkeypatch.setattr(placement, "check_kernels", lambda *_: None)
    strategy: Any = SingleDeviceStrategy(torch.device("cuda"))
    model = LanguageModel(tiny_model("llama"), LinearCrossEntropyLoss())
    assert placement_of(strategy).compiled_by_default(model, training=True, kernels="float8") == "regional"


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


def test_a_fit_on_a_cpu_compiles_nothing_by_default(tmp_path):
    assert not fitted(tmp_path, tiny_model("llama"), "auto").model.is_compiled


@pytest.mark.needs_compiler
def test_what_cannot_be_compiled_is_refused_by_name(monkeypatch):
    model = LanguageModel(tiny_model("llama"), LinearCrossEntropyLoss())
    check_compile(model, "regional", CPU)
    monkeypatch.setattr(Sharded, "tensor_mesh", None)
    monkeypatch.setattr(PipelineStrategy, "root_device", CPU)
    placement_of(PipelineStrategy(2)).check(model, training=True, compile="regional", kernels="none")
    for how, chosen, message in (
        ("whole", FSDP2Strategy(), "compile=whole would be cut at every layer.*choose compile=regional"),
        ("whole", PipelineStrategy(2), "compile=whole was never tested .* or a pipeline; choose compile=regional"),
        ("regional", PipelineStrategy(2, 1, "ZBVZeroBubble", 4), "compile=regional was never .* choose compile=none"),
    ):
        with pytest.raises(UserError, match=message):
            placement_of(chosen).check(model, training=True, compile=how, kernels="none")
    monkeypatch.setattr(Sharded, "tensor_mesh", "ranks that divide each matrix")
    with pytest.raises(UserError, match="compile=whole was never tested under tensor.*choose compile=regional"):
        placement_of(FSDP2Strategy()).check(model, training=True, compile="whole", kernels="none")
    with pytest.raises(UserError, match="TinyBackbone has no repeated layers"):
        check_compile(LanguageModel(tiny_backbone(TinyBackbone), LinearCrossEntropyLoss()), "regional", CPU)
    compile_backbone(model, "regional")
    with pytest.raises(UserError, match="the model is compiled already"):
        check_compile(model, "whole", CPU)
    with pytest.raises(UserError, match="compile must be one of none, auto, regional, whole, got 'all'"):
        FusedCausalLMModule(tiny_model("llama"), compile="all")


def test_a_missing_compiler_is_named_before_training(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    model = LanguageModel(tiny_model("llama"), LinearCrossEntropyLoss())
    missing = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    with missing, pytest.raises(UserError, match=r"compile=whole needs a C\+\+ compiler.*or choose compile=none"):
        check_compile(model, "whole", CPU)


# Liger's kernels. In Triton's interpreter that of rotary embeddings runs, those of norms and gated MLPs do not.


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU test_gpu.py runs all of them")
@pytest.mark.parametrize("name", ["qwen3_tied", "llama", "mistral"])
def test_ligers_rotary_embeddings_are_on_one_model_and_give_its_loss_and_gradients(name, monkeypatch):
    pytest.importorskip("liger_kernel")
    from liger_kernel.ops.rope import LigerRopeFunction

    ran: list[Any] = []
    plain, model = tiny_model(name), tiny_model(name)
    batch = tiny_batch(2, 6)  # The interpreter takes its time for each token.
    names = list(model.state_dict())
    use_liger_kernels(model, rms_norm=False, swiglu=False)
    assert list(model.state_dict()) == names
    own: Any = LigerRopeFunction.forward
    monkeypatch.setattr(LigerRopeFunction, "forward", staticmethod(lambda *a: (ran.append(a), own(*a))[1]))
    expected = LanguageModel(plain, LinearCrossEntropyLoss())(batch).loss
    assert not ran, "another model of the same process runs Liger's kernels"
    found = LanguageModel(model, LinearCrossEntropyLoss())(batch).loss
    assert len(ran) >= model.config.num_hidden_layers
    expected.backward()
    found.backward()
    assert torch.allclose(found, expected, rtol=1e-5)
    for (key, p), q in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert p.grad is not None, key
        assert q[1].grad is not None, key
        assert torch.allclose(p.grad, q[1].grad, atol=1e-6 + 1e-4 * p.grad.abs().max().item()), key


def scaled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class Scales(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled(x)


@pytest.mark.parametrize("regional", [True, False])
def test_compiled_layers_call_their_own_function_and_their_neighbour_the_modules(regional):
    """torch.compile looks a function's globals up in the module that they name, and shares what it made of its code."""
    replaced = _with_globals(Scales.forward, {"scaled": lambda x: 5 * x})
    layers = nn.Sequential(*(Scales() for _ in range(3)))
    for layer in list(layers)[:2]:
        layer.forward = MethodType(replaced, layer)
    torch._dynamo.reset()
    for part in layers if regional else [layers]:
        part.compile(backend="eager", fullgraph=True)
    assert layers(torch.ones(2)).tolist() == [50, 50]


def test_ligers_kernels_are_put_on_a_model_without_weights_too():
    pytest.importorskip("liger_kernel")
    model = lit_fused.from_config(tiny_model("gemma2").config)
    use_liger_kernels(model)
    assert "Liger" in str(model.model.layers[0].mlp)
    assert "Liger" in str(model.model.norm)
    of_layers = {layer.self_attn.forward.__func__ for layer in model.model.layers}
    assert len(of_layers) == 1, "torch.compile would leave what it made of one layer to the others, who cannot find it"
    assert "Liger" not in str(tiny_model("gemma2")), "a class of transformers has been replaced"
    materialize(model)
    other = copy.deepcopy(model)
    assert other.model.norm.forward.__self__ is other.model.norm


def test_where_ligers_kernels_cannot_run_they_are_refused_by_name(monkeypatch, tmp_path):
    pytest.importorskip("liger_kernel")
    model = LanguageModel(tiny_model("llama"), LinearCrossEntropyLoss())
    check_kernels(model, "liger", CUDA)
    for unfit, device, message in (
        (model, CPU, "kernels=liger are for a CUDA GPU, and this is cpu; choose kernels=none"),
        (LanguageModel(tiny_model("gpt2"), LinearCrossEntropyLoss()), CUDA, "no kernels for GPT2LMHeadModel"),
        (LanguageModel(tiny_backbone(), LinearCrossEntropyLoss()), CUDA, "no kernels for TinyBackbone"),
        (
            LanguageModel(tiny_model("llama", hidden_act="relu"), LinearCrossEntropyLoss()),
            CUDA,
            "LlamaForCausalLM has the activation relu, for which Liger's kernels would compute silu",
        ),
    ):
        with pytest.raises(UserError, match=message):
            check_kernels(unfit, "liger", device)
    with pytest.raises(UserError, match="are for a CUDA GPU, and this is cpu"):
        quiet_trainer(tmp_path).fit(FusedCausalLMModule(tiny_model("llama"), kernels="liger"), loader([tiny_batch()]))
    with pytest.raises(UserError, match="kernels must be one of none, liger, float8, got 'Liger'"):
        FusedCausalLMModule(tiny_model("llama"), kernels="Liger")
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(UserError, match=r"Install it with: pip install 'lit-fused\[liger\]'"):
        check_kernels(model, "liger", CUDA)
