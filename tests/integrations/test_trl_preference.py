"""TRL's trainers of preferences and our loss, on the batches that TRL makes: the same losses and gradients."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import make_tokenizer
from datasets import Dataset
from tiny_models import tiny_model
from torch import Tensor
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_config import KTOConfig
from trl.trainer.kto_trainer import KTOTrainer

from lit_fused import FusedPreferenceModule, PreferenceLoss
from lit_fused.data import PreferenceEncoding, TokenDataModule

RECORDS = [
    {"prompt": "the quick", "chosen": " brown fox", "rejected": " dog"},
    {"prompt": "How are", "chosen": " you?", "rejected": " you? the lazy fox"},
    {"prompt": "12 + 30 =", "chosen": " 42", "rejected": " 30 and more"},
    {"prompt": "fox", "chosen": " and dog", "rejected": " fox"},
]
SINGLE = [  # The answer to each prompt and to the next one are no longer than the first row.
    {"prompt": "the quick brown fox and", "completion": " the lazy dog and the fox", "label": True},
    {"prompt": "How are", "completion": " you?", "label": False},
    {"prompt": "12 + 30 =", "completion": " 42", "label": True},
    {"prompt": "fox", "completion": " and dog", "label": False},
]
LOSSES = {
    "dpo": ("sigmoid", {}),
    "hinge": ("hinge", {}),
    "ipo": ("ipo", {}),
    "robust": ("robust", {"label_smoothing": 0.2}),
    "apo_zero": ("apo_zero", {}),
    "apo_down": ("apo_down", {}),
}
FIXED: dict[str, Any] = {
    "use_cpu": True,
    "report_to": [],
    "per_device_train_batch_size": 4,
    "bf16": False,
    "gradient_checkpointing": False,
    "beta": 0.3,
}


def models() -> tuple[Any, Any, Any]:
    """A tokenizer, the model to train, and a reference with other weights."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    size: dict[str, Any] = {"vocab_size": len(tokenizer)}
    model, reference = tiny_model("llama", **size), tiny_model("llama", **size).eval()
    generator = torch.Generator().manual_seed(2)
    for p in reference.parameters():
        p.data += 0.05 * torch.randn(p.shape, generator=generator)
    return tokenizer, model, reference


def assert_same(model: Any, ours: Tensor, theirs: Tensor) -> None:
    own, others = (
        torch.cat([g.flatten() for g in torch.autograd.grad(x, [*model.parameters()])]) for x in (ours, theirs)
    )
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert (own - others).norm() <= 1e-5 * others.norm()


def ours_of(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """TRL's chosen answers come first, ours before each rejected one."""
    order = torch.arange(8).view(2, 4).T.flatten()
    labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
    batch = {"input_ids": inputs["input_ids"], "labels": labels, "attention_mask": inputs["attention_mask"]}
    return {name: value[order] for name, value in batch.items()} | {"desirable": torch.tensor([1, 0] * 4)}


def dpo_trainer(folder: Path, **options: Any) -> tuple[Any, Any, Any]:
    tokenizer, model, reference = models()
    arguments = DPOConfig(str(folder), **(FIXED | options))
    data = Dataset.from_list(RECORDS)
    trainer = DPOTrainer(model, reference, args=arguments, train_dataset=data, processing_class=tokenizer)
    return trainer, model, reference


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_those_of_trl(name, tmp_path):
    kind, options = LOSSES[name]
    trainer, model, reference = dpo_trainer(tmp_path, loss_type=[kind], **options)
    inputs = next(iter(trainer.get_train_dataloader()))
    theirs = trainer.compute_loss(trainer.model, dict(inputs))
    module = FusedPreferenceModule(model, PreferenceLoss(name, beta=0.3, **options), reference=reference)
    assert_same(model, module.model(ours_of(inputs)).loss, theirs)


def test_rpo_is_trls_mixture_of_sigmoid_and_sft_over_micro_batches_of_a_pair(tmp_path):
    weights, one = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.4]}, {"per_device_train_batch_size": 1}
    trainer, model, reference = dpo_trainer(tmp_path, **weights, **one)
    rows = trainer.train_dataset
    theirs = [trainer.compute_loss(trainer.model, trainer.data_collator([row])) for row in rows]
    module = FusedPreferenceModule(model, PreferenceLoss("rpo", beta=0.3, nll_weight=0.4), reference=reference)
    batch = ours_of(trainer.data_collator([*rows]))
    assert_same(model, module.model(batch).loss, torch.stack(theirs).mean())


def test_our_data_have_the_tokens_and_the_loss_of_trls(tmp_path):
    trainer, model, reference = dpo_trainer(tmp_path)
    inputs = next(iter(trainer.get_train_dataloader()))
    theirs = trainer.compute_loss(trainer.model, dict(inputs))
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    trainer.processing_class.save_pretrained(tmp_path / "tokenizer")
    source, options = tmp_path / "pairs.jsonl", {"block_size": 64, "batch_size": 4}
    settings: Any = options | {
        "tokenizer": tmp_path / "tokenizer",
        "cache_dir": tmp_path / "cache",
        "val_source": source,
    }
    data = TokenDataModule(source, PreferenceEncoding(), **settings)
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))

    def rows(batch: dict[str, Tensor]) -> set[Any]:
        columns = [batch[name] for name in ("input_ids", "labels", "attention_mask")]
        return {
            (*ids[mask == 1].tolist(), *labels[mask == 1].tolist()) for ids, labels, mask in zip(*columns, strict=True)
        }

    assert rows(batch) == rows(ours_of(inputs))
    module = FusedPreferenceModule(model, PreferenceLoss("dpo", beta=0.3), reference=reference)
    assert_same(model, module.model(batch).loss, theirs)


def test_loss_and_gradients_are_those_of_trls_kto(tmp_path):
    tokenizer, model, reference = models()
    options: dict[str, Any] = {"desirable_weight": 1.3, "undesirable_weight": 0.8}
    arguments = KTOConfig(str(tmp_path), train_sampling_strategy="sequential", **FIXED, **options)
    data = Dataset.from_list(SINGLE)
    trainer: Any = KTOTrainer(model, reference, args=arguments, train_dataset=data, processing_class=tokenizer)
    inputs = next(iter(trainer.get_train_dataloader()))
    theirs = trainer.compute_loss(trainer.model, dict(inputs))
    labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
    batch = {"input_ids": inputs["input_ids"], "labels": labels, "attention_mask": inputs["attention_mask"]}
    batch["desirable"] = torch.as_tensor(inputs["label"]).long()
    module = FusedPreferenceModule(model, PreferenceLoss("kto", beta=0.3, **options), reference=reference)
    output = module.model(batch)
    assert output.stats["kl"] > 0
    assert_same(model, output.loss, theirs)


@pytest.mark.parametrize("name", ["cpo", "simpo", "orpo"])
def test_without_their_likelihoods_loss_and_gradients_are_those_of_trl(name, tmp_path):
    tokenizer, model, _ = models()
    data = Dataset.from_list(RECORDS)
    of_simpo: dict[str, Any] = {"loss_type": "simpo", "simpo_gamma": 0.5} if name == "simpo" else {}
    if name == "orpo":
        arguments: Any = ORPOConfig(str(tmp_path), **FIXED)
        trainer: Any = ORPOTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer)
    else:
        arguments = CPOConfig(str(tmp_path), cpo_alpha=0.0, disable_dropout=False, **FIXED, **of_simpo)
        trainer = CPOTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer)
    inputs = next(iter(trainer.get_train_dataloader()))
    theirs, _ = trainer.get_batch_loss_metrics(model, inputs)
    if name == "orpo":
        theirs = theirs - trainer.concatenated_forward(model, inputs)[4]
    joined = trainer.concatenated_inputs(inputs, padding_value=tokenizer.pad_token_id)
    batch = {part: joined[f"concatenated_{part}"] for part in ("input_ids", "labels", "attention_mask")}
    order = torch.arange(8).view(2, 4).T.flatten()
    batch = {part: value[order] for part, value in batch.items()} | {"desirable": torch.tensor([1, 0] * 4)}
    options: dict[str, Any] = {"margin": 0.5} if name == "simpo" else {}
    loss = PreferenceLoss(name, beta=0.3, nll_weight=0.0, **options)
    assert_same(model, FusedPreferenceModule(model, loss).model(batch).loss, theirs)
