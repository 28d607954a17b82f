"""Test what tensor parallelism refuses, how it groups devices and what it sums; all else is in test_parallel.py."""

import re
from pathlib import Path
from typing import Any

import architectures
import lightning as L
import pytest
import torch
import torch.distributed as dist
from composed import composed
from hydra.utils import instantiate
from peft import LoraConfig, get_peft_model
from ranks import call
from tiny_models import TinyBackbone, tiny_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

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


def test_dropout_does_not_matter_where_nothing_is_trained():
    model = LanguageModel(tiny_model("llama", attention_dropout=0.1), LinearCrossEntropyLoss())
    check_plan(model, 2, training=False)


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
    with pytest.raises(UserError, match=f"1 x 3 devices cannot be grouped by {wanted}"):
        L.Trainer(accelerator="cpu", devices=3, strategy=FSDP2Strategy(**arguments), logger=False)


class WithResidual(nn.Module):
    """Adds a feed-forward layer's input to its output, which is for more than its matrices then."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act = (
            layer.gate_proj,
            layer.up_proj,
            layer.down_proj,
            layer.act_fn,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x)) + 0.5 * x


def count_sums(rank: int, folder: Path, kind: str) -> None:
    """Save how many sums over two ranks a forward and a backward take, and a gradient, on the first rank."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = LanguageModel(built(kind), LinearCrossEntropyLoss())
    divide(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tensor_parallel",)), torch.device("cpu"))
    with CommDebugMode() as communication:
        gradient = gradient_of(model.backbone)
    if rank == 0:
        sums = sum(n for name, n in communication.get_comm_counts().items() if "all_reduce" in str(name))
        torch.save({"sums": sums, "gradient": gradient}, folder / "found.pt")
    dist.barrier()


def built(kind: str) -> Any:
    torch.manual_seed(0)
    model = tiny_model("llama")
    if kind == "input used twice":
        for layer in model.model.layers:
            layer.mlp = WithResidual(layer.mlp)
    return model


def gradient_of(model: Any) -> Tensor:
    tokens = torch.arange(12).view(2, 6)
    model(input_ids=tokens, use_cache=False).logits.square().sum().backward()
    return model.model.norm.weight.grad


@pytest.mark.parametrize(("kind", "of_a_layer"), [("as it comes", 4), ("input used twice", 7)])
def test_matrices_that_read_one_input_sum_its_gradient_once_where_nothing_else_reads_it(tmp_path, kind, of_a_layer):
    call(count_sums, 2, tmp_path, kind, timeout=60)
    found, whole = torch.load(tmp_path / "found.pt"), built(kind)
    of_embedding_and_logits = 2
    assert found["sums"] == of_a_layer * whole.config.num_hidden_layers + of_embedding_and_logits
    torch.testing.assert_close(found["gradient"], gradient_of(whole), rtol=1e-5, atol=1e-6)


def say_what_refuses(rank: int, folder: Path, architecture: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor_parallel",))
    backbone = architectures.tiny_model(architectures.Entry(*architecture.split("-")))
    model = architectures.language_model(backbone, masked=architecture.endswith("masked"))
    check_plan(model, 2, training=True)
    with pytest.raises(UserError) as refused:
        divide(model, mesh, torch.device("cpu"))
    (folder / str(rank)).write_text(str(refused.value))


@pytest.mark.parametrize("architecture", ["doge-causal", "esmc-masked", "gemma4-causal"])
def test_a_plan_under_which_the_models_code_fails_is_refused_on_every_rank(tmp_path, architecture):
    call(say_what_refuses, 2, tmp_path, architecture, timeout=60)
    for rank in range(2):
        said = (tmp_path / str(rank)).read_text()
        assert re.match(
            r"transformers' tensor-parallel plan does not fit \w+: divided over ranks, it does not run", said
        )
        assert said.endswith("; choose strategy=fsdp2, which shards any model")
