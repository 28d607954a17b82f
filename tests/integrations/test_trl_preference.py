"""TRL's trainer of preferences and our loss, on the batches that TRL makes: the same losses and gradients."""

from typing import Any

import pytest
import torch
from chat_templates import make_tokenizer
from datasets import Dataset
from tiny_models import tiny_model
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

from lit_fused import FusedPreferenceModule, PreferenceLoss

RECORDS = [
    {"prompt": "the quick", "chosen": " brown fox", "rejected": " dog"},
    {"prompt": "How are", "chosen": " you?", "rejected": " you? the lazy fox"},
    {"prompt": "12 + 30 =", "chosen": " 42", "rejected": " 30 and more"},
    {"prompt": "fox", "chosen": " and dog", "rejected": " fox"},
]
LOSSES = {
    "dpo": ("sigmoid", {}),
    "hinge": ("hinge", {}),
    "ipo": ("ipo", {}),
    "robust": ("robust", {"label_smoothing": 0.2}),
    "apo_zero": ("apo_zero", {}),
    "apo_down": ("apo_down", {}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_those_of_trl(name, tmp_path):
    kind, options = LOSSES[name]
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    size: dict[str, Any] = {"vocab_size": len(tokenizer)}
    model, reference = tiny_model("llama", **size), tiny_model("llama", **size).eval()
    generator = torch.Generator().manual_seed(2)
    for p in reference.parameters():
        p.data += 0.05 * torch.randn(p.shape, generator=generator)
    settings: dict[str, Any] = {"loss_type": [kind], "beta": 0.3, **options}
    arguments = DPOConfig(
        str(tmp_path),
        use_cpu=True,
        report_to=[],
        per_device_train_batch_size=4,
        bf16=False,
        **settings,
        gradient_checkpointing=False,
    )
    trainer: Any = DPOTrainer(
        model, reference, args=arguments, train_dataset=Dataset.from_list(RECORDS), processing_class=tokenizer
    )
    inputs = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, dict(inputs))
    loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    module = FusedPreferenceModule(model, PreferenceLoss(name, beta=0.3, **options), reference=reference)
    order = torch.arange(8).view(2, 4).T.flatten()  # TRL's chosen answers come first, ours before each rejected one.
    labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
    batch = {"input_ids": inputs["input_ids"], "labels": labels, "attention_mask": inputs["attention_mask"]}
    found = module.model({n: value[order] for n, value in batch.items()} | {"desirable": torch.tensor([1, 0] * 4)})
    found.loss.backward()
    own = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert found.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    assert (own - gradients).norm() <= 1e-5 * gradients.norm()
