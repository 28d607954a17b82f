"""``lit_fused.plan`` of a module of one's own, of a fused model, and with a trainer."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from composed import composed
from lightning.pytorch.strategies import DDPStrategy
from tiny_models import tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

import lit_fused
from lit_fused import FusedCausalLMModule, FusedMaskedLMModule, LinearCrossEntropyLoss, PlanOptions
from lit_fused.app.commands.memory_plan import planned
from lit_fused.planning import Spread

CONFIG = LlamaConfig(vocab_size=4096, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
BATCH = {name: torch.ones(4, 64, dtype=torch.long) for name in ("input_ids", "labels")}
ON_HOPPER = PlanOptions(compute_capability=9.0, precision="bf16-mixed")


def tiny_llama() -> Any:
    return AutoModelForCausalLM.from_config(CONFIG)


class Own(L.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer)}


class WithLoss(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.head = model.model, model.lm_head
        self.loss = LinearCrossEntropyLoss(output_embeddings=self.head)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.model(input_ids).last_hidden_state, labels)


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
@pytest.mark.parametrize("make", [tiny_llama, lambda: Own(tiny_llama())], ids=["transformers", "LightningModule"])
def test_a_module_of_ones_own_is_planned_with_its_own_loss(make):
    module = make()
    found = lit_fused.plan(ON_HOPPER, module, BATCH)
    bytes_of_all = 4 * sum(p.numel() for p in module.parameters())
    assert found.phases["optimizer"]["gradients"] == pytest.approx(bytes_of_all, rel=0.1)
    assert found.phases["optimizer"]["optimizer state"] == pytest.approx(2 * bytes_of_all, rel=0.1)
    assert found.phases["forward"]["output head"] > 4 * BATCH["labels"].numel() * CONFIG.vocab_size


@pytest.mark.parametrize("make", [lambda: lit_fused.fuse(tiny_llama()), lambda: WithLoss(tiny_llama())])
def test_a_fused_model_is_planned_as_the_module_is(make: Callable[[], nn.Module]):
    both = make(), FusedCausalLMModule(tiny_llama())
    found, module = (lit_fused.plan(ON_HOPPER, each, BATCH).phases["backward"] for each in both)
    for name in ("weights", "gradients", "activations"):
        assert found[name] == pytest.approx(module[name], rel=0.02, abs=2048), name


def test_a_plan_leaves_a_module_as_it_was():
    model = lit_fused.fuse(tiny_llama()).eval()
    own = {name: (p, p.clone()) for name, p in model.named_parameters()}
    before = model(**BATCH).loss
    lit_fused.plan(ON_HOPPER, model, BATCH)
    assert all(p is own[name][0] and torch.equal(p, own[name][1]) for name, p in model.named_parameters())
    assert not model.training
    assert torch.equal(model(**BATCH).loss, before)
    module = FusedCausalLMModule(tiny_llama())
    lit_fused.plan(ON_HOPPER, module, BATCH)
    assert module.model.head is None, "a run finds the head by experiment"


def test_a_trainer_says_precision_accumulation_and_strategy():
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    trainer = L.Trainer(precision="bf16-mixed", accumulate_grad_batches=3, **options)
    asked, told = (
        lit_fused.plan(given, FusedCausalLMModule(tiny_llama()), BATCH)
        for given in (trainer, PlanOptions(precision="bf16-mixed", accumulate_grad_batches=3))
    )
    assert asked.phases == told.phases
    assert PlanOptions(strategy=DDPStrategy(), devices=2).spread == Spread("ddp on 2", buckets=True)


def test_tokens_without_a_label_are_planned_as_if_all_had_one():
    plans = [
        lit_fused.plan(ON_HOPPER, FusedMaskedLMModule(tiny_model("bert"), LinearCrossEntropyLoss(impl)), BATCH)
        for impl in ("chunked", "liger")
    ]
    assert all(plan.phases["backward"]["gradients"] for plan in plans)


def test_a_plan_of_adapters_has_gradients_of_them_alone():
    lora = ("model=lora", "model@model.model=llama", "data=synthetic", "model.model.config.num_hidden_layers=1")
    found = planned(composed(*lora), PlanOptions())
    assert 0 < found["trained"] < 0.2 * found["parameters"]
    gradients = found["phases_gib"]["optimizer"]["gradients"] * 2**30
    assert gradients == pytest.approx(4 * found["trained"], rel=0.05)
