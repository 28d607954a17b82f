"""Test what tensor parallelism refuses, how it groups devices and what it sums; all else is in test_parallel.py."""

import re
from typing import Any

import architectures
import lightning as L
import pytest
import torch
import torch.distributed as dist
from composed import composed
from hydra.utils import instantiate
from peft import LoraConfig, get_peft_model
from ranks import Refusal, each
from tiny_models import TinyBackbone, tiny_model
from torch.distributed.device_mesh import init_device_mesh

from lit_fused import LinearCrossEntropyLoss, UserError
from lit_fused.app.commands import MODES
from lit_fused.app.config import check_config
from lit_fused.models.language_model import LanguageModel
from lit_fused.parallel import FSDP2Strategy
from lit_fused.parallel.tensor import check_plan, divide


def lora() -> Any:
    return get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj"]))


def compiled_inside() -> Any:
    model = tiny_model("llama")
    model.model.layers[0].compile()
    return model


_WITHOUT = "tensor parallelism divides a model of transformers, without PEFT's adapters and torch.compile"
REFUSED = {
    "plain module": (TinyBackbone, 2, f"{_WITHOUT}; TinyBackbone"),
    "no plan": (lambda: tiny_model("gpt2"), 2, "tensor-parallel plan of GPT2LMHeadModel has no layers"),
    "head only": (lambda: tiny_model("falcon_h1"), 2, "tensor-parallel plan of FalconH1ForCausalLM has no layers"),
    "experts": (lambda: tiny_model("mixtral"), 2, "plan of MixtralForCausalLM has moe_tp_experts, packed_colwise"),
    "adapters": (lora, 2, _WITHOUT),
    "compiled": (lambda: torch.compile(tiny_model("llama")), 2, _WITHOUT),
    "compiled inside": (compiled_inside, 2, _WITHOUT),
    "heads": (lambda: tiny_model("llama"), 3, "tensor_parallel_size=3 does not divide num_attention_heads=4 of Llama"),
    "key heads": (lambda: tiny_model("llama"), 4, "tensor_parallel_size=4 does not divide num_key_value_heads=2"),
    "odd width": (
        lambda: tiny_model("llama", intermediate_size=49),
        2,
        "does not divide model.layers.0.mlp.gate_proj=49",
    ),
    "dropout": (lambda: tiny_model("llama", attention_dropout=0.1), 2, "LlamaForCausalLM has attention_dropout=0.1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_divided_exactly_is_refused_by_name(what):
    build, ranks, message = REFUSED[what]
    with pytest.raises(UserError, match=re.escape(message)):
        check_plan(LanguageModel(build(), LinearCrossEntropyLoss()), ranks, training=True)


@pytest.mark.parametrize("loss", ["cce", "torch_native", "torch_compile", "liger"])
def test_a_backend_without_a_vocabulary_parallel_form_is_refused(loss):
    with pytest.raises(UserError, match=f"loss={loss} has no vocabulary-parallel form.*choose loss=chunked"):
        check_plan(LanguageModel(tiny_model("llama"), LinearCrossEntropyLoss(loss)), 2, training=True)


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        (["strategy=fsdp2", "trainer.devices=4", "trainer.num_nodes=2"], (8, 1)),
        (["strategy=tp", "trainer.devices=4"], (1, 4)),
        (["strategy=tp", "trainer.devices=4", "trainer.num_nodes=2"], (2, 4)),
        (["strategy=fsdp2_tp", "trainer.devices=8"], (4, 2)),
        (["strategy=fsdp2_tp", "trainer.devices=8", "trainer.strategy.tensor_parallel_size=4"], (2, 4)),
    ],
)
def test_the_command_line_groups_the_trainers_devices(overrides, sizes):
    config = composed(*overrides, "trainer.accelerator=cpu")
    check_config(config, MODES)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=config.trainer.devices,
        num_nodes=config.trainer.num_nodes,
        strategy=instantiate(config.trainer.strategy),
        logger=False,
    )
    strategy: Any = trainer.strategy
    assert strategy.sizes == sizes


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"data_parallel_size": 2, "tensor_parallel_size": 1}, "data_parallel_size=2 times tensor_parallel_size=1"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0"),
    ],
)
def test_devices_that_cannot_be_grouped_are_refused_before_any_process_starts(arguments, wanted):
    with pytest.raises(UserError, match=f"3 devices cannot be grouped by {wanted}"):
        L.Trainer(accelerator="cpu", devices=3, strategy=FSDP2Strategy(**arguments), logger=False)


def divided(architecture: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor_parallel",))
    backbone = architectures.tiny_model(architectures.Entry(*architecture.split("-")))
    model = architectures.language_model(backbone, masked=architecture.endswith("masked"))
    check_plan(model, 2, training=True)
    divide(model, mesh, torch.device("cpu"))


@pytest.mark.parametrize("architecture", ["doge-causal", "esmc-masked", "gemma4-causal"])
def test_a_plan_under_which_the_models_code_fails_is_refused_on_every_rank(architecture):
    said = each(divided, 2, [architecture], timeout=60)[architecture]
    assert isinstance(said, Refusal)
    assert re.match(r"transformers' tensor-parallel plan does not fit \w+: divided over ranks, it does not run", said)
    assert said.endswith("; choose strategy=fsdp2, which shards any model")
