"""Vision-language models: the loss of text that follows images, exact for three architectures and ragged images."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors_of import relative_error
from lightning_helpers import loader, quiet_trainer
from torch import Tensor
from vision_cases import CONFIGS, batch_of, tiny

from lit_fused import (
    CrossEntropyLoss,
    FusedCausalLMModule,
    LanguageModel,
    LinearCrossEntropyLoss,
    from_pretrained,
    materialize,
)


def truth(
    name: str, batches: list[dict[str, Any]], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss over the labels of all batches and its gradients, of the model's own logits."""
    model: Any = tiny(name)
    model.to(dtype)
    total, count = torch.zeros((), dtype=dtype), 0
    for batch in batches:
        inputs = {key: v.to(dtype) if v.is_floating_point() else v for key, v in batch.items() if key != "labels"}
        logits, labels = model(**inputs, use_cache=False).logits[:, :-1], batch["labels"][:, 1:]
        total = total + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count += int((labels != -100).sum())
    loss = total / count
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return relative_error(found, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("images", [[2, 1, 0], [0, 0]], ids=["ragged images", "text alone"])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_are_those_of_the_models_own_logits(name, images, dtype):
    backbone: Any = tiny(name)
    batch = batch_of(name, images)
    backbone.to(dtype)
    model = LanguageModel(backbone, LinearCrossEntropyLoss())
    model.prepare(torch.device("cpu"))
    if "pixel_values" in batch:
        batch["pixel_values"] = batch["pixel_values"].to(dtype)
    output = model(batch)
    output.loss.backward()
    loss, gradients = truth(name, [batch])
    _, plain = truth(name, [batch], dtype)
    found = {n: p.grad for n, p in backbone.named_parameters() if p.grad is not None}
    assert output.loss.item() == pytest.approx(loss.item(), rel=1e-12 if dtype == torch.float64 else 1e-6)
    assert errors(found, gradients) <= max(1e-11, 2 * errors(plain, gradients))
    sees_images = any("vision" in n or "visual" in n for n in gradients)
    assert sees_images == bool(sum(images))


@pytest.mark.parametrize("name", CONFIGS)
def test_accumulated_batches_with_different_numbers_of_images_are_one_mean_over_their_labels(name, tmp_path):
    batches = [batch_of(name, images, 14 + 3 * n, n) for n, images in enumerate(([1, 1], [2, 0, 1], [0, 0], [1]))]
    found: dict[str, Any] = {}

    class Module(FusedCausalLMModule):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            found.update({n: p.grad.clone() for n, p in self.backbone.named_parameters() if p.grad is not None})

    for loss in (LinearCrossEntropyLoss(), CrossEntropyLoss()):
        found.clear()
        module = Module(tiny(name), loss)
        trainer = quiet_trainer(tmp_path, max_epochs=1, accumulate_grad_batches=len(batches))
        trainer.fit(module, loader(batches), loader(batches))
        assert trainer.global_step == 1
        expected, gradients = truth(name, batches)
        assert errors(found, gradients) <= 1e-5
    scored = FusedCausalLMModule(tiny(name))
    [logged] = quiet_trainer(tmp_path).validate(scored, loader(batches), verbose=False)
    assert logged["val/loss"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_of_a_folder_that_come_late_give_the_same_loss(name, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    backbone = from_pretrained(tmp_path).train()
    materialize(backbone)
    assert type(backbone) is type(tiny(name))
    batch = batch_of(name, [1, 2])
    output = LanguageModel(backbone, LinearCrossEntropyLoss())(batch)
    assert output.loss.item() == pytest.approx(truth(name, [batch])[0].item(), rel=1e-6)
