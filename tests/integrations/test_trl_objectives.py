"""Distillation beside TRL's two trainers of it, on the batch that each trainer makes: the same losses and gradients."""

from typing import Any

import pytest
import torch
from chat_templates import CHATML_MARKED, make_tokenizer
from datasets import Dataset
from errors_of import assert_same_gradients
from tiny_models import sharpen, tiny_model
from torch import Tensor
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.trainer.distillation_config import DistillationConfig
from trl.trainer.distillation_trainer import DistillationTrainer

from lit_fused import DistillationLoss, FusedDistillationModule

KINDS: dict[float, dict[str, Any]] = {0.0: {"divergence": "forward_kl"}, 1.0: {"divergence": "reverse_kl"}}
FIXED: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": [], "per_device_train_batch_size": 3}


def models() -> tuple[Any, Any, Any]:
    tokenizer = make_tokenizer(CHATML_MARKED)
    tokenizer.pad_token = tokenizer.eos_token
    size: dict[str, Any] = {"vocab_size": len(tokenizer)}
    student, teacher = sharpen(tiny_model("llama", **size), 10), sharpen(tiny_model("qwen3", **size), 20)
    return tokenizer, student, teacher


def assert_same(student: Any, teacher: Any, batch: dict[str, Tensor], theirs: Any, **options: Any) -> None:
    module = FusedDistillationModule(student, DistillationLoss(**options), teacher=teacher)
    ours = module.model(batch).loss
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert_same_gradients(ours, theirs, student.parameters(), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_loss_and_gradients_are_those_of_gkd_whose_temperature_is_of_sampling_alone(beta, temperature, tmp_path):
    tokenizer, student, teacher = models()
    arguments = GKDConfig(str(tmp_path), lmbda=0.0, beta=beta, temperature=temperature, **FIXED)
    said = ["a quick fox", "dogs", "the lazy dog jumps"]
    data = Dataset.from_list(
        [{"messages": [{"role": "user", "content": "fox"}, {"role": "assistant", "content": text}]} for text in said]
    )
    trainer = GKDTrainer(student, teacher, args=arguments, train_dataset=data, processing_class=tokenizer)
    inputs = next(iter(trainer.get_train_dataloader()))
    theirs = trainer.compute_loss(trainer.model, inputs)
    batch = {name: inputs[name] for name in ("input_ids", "labels", "attention_mask")}
    assert_same(student, teacher, batch, theirs, **KINDS.get(beta, {"divergence": "jsd", "beta": beta}))


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_loss_and_gradients_are_those_of_the_distillation_trainer_whose_temperature_divides_logits(beta, tmp_path):
    tokenizer, student, teacher = models()
    arguments = DistillationConfig(str(tmp_path), beta=beta, temperature=0.6, **FIXED)
    data = Dataset.from_list([{"prompt": "fox"}] * 3)
    trainer = DistillationTrainer(student, teacher, args=arguments, train_dataset=data, processing_class=tokenizer)
    ids = torch.randint(3, len(tokenizer), (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(9) < torch.tensor([[9], [6], [7]])
    inputs = {"prompt_ids": ids[:, :4], "completion_ids": ids[:, 4:]}
    inputs |= {"prompt_mask": mask[:, :4].long(), "completion_mask": mask[:, 4:].long()}
    theirs = trainer.compute_loss(trainer.model, inputs)
    labels = ids.masked_fill(~mask | (torch.arange(9) < 4), -100)
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask.long()}
    options = KINDS.get(beta, {"divergence": "jsd", "beta": beta}) | {"temperature": 0.6}
    assert_same(student, teacher, batch, theirs, **options)
