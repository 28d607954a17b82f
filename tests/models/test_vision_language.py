"""Vision-language models: the loss of text that follows images, exact for three architectures and ragged images."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors_of import relative_error
from lightning_helpers import loader, quiet_trainer
from tiny_models import sharpen
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    SiglipVisionConfig,
)

from lit_fused import (
    CrossEntropyLoss,
    FusedCausalLMModule,
    LanguageModel,
    LinearCrossEntropyLoss,
    from_pretrained,
    materialize,
)

VOCABULARY, IMAGE, VIDEO, VISION_START = 97, 90, 91, 92
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def llava() -> Any:
    parts: dict[str, Any] = {"vision_config": CLIPVisionConfig(**TOWER), "text_config": LlamaConfig(**TEXT)}
    return LlavaConfig(**parts, image_token_index=IMAGE, image_seq_length=4)


def qwen_vl() -> Any:
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 24,
        "out_hidden_size": 32,
    }
    vision |= {"patch_size": 4, "spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [1]}
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    ids: dict[str, Any] = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": VISION_START}
    parts: dict[str, Any] = {"text_config": TEXT | {"rope_parameters": rope}, "vision_config": vision}
    return Qwen2_5_VLConfig(**parts, **ids)


def gemma3() -> Any:
    text = Gemma3TextConfig(**TEXT, head_dim=8, final_logit_softcapping=4.0, sliding_window=8)
    parts: dict[str, Any] = {"text_config": text, "vision_config": SiglipVisionConfig(**TOWER)}
    return Gemma3Config(**parts, mm_tokens_per_image=4, image_token_index=IMAGE)


CONFIGS: dict[str, Callable[[], Any]] = {"llava": llava, "qwen_vl": qwen_vl, "gemma3": gemma3}


def tiny(name: str) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(CONFIGS[name](), attn_implementation="eager")
    return sharpen(model, 5.0).train()


def batch_of(name: str, images: list[int], length: int = 20, seed: int = 0) -> dict[str, Any]:
    """Rows with so many images each, of 4 positions; labels of the text that follows them, the last row is padded."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 90, (len(images), length), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    for row, count in enumerate(images):
        for image in range(count):
            start = 1 + 6 * image
            ids[row, start - 1] = VISION_START
            ids[row, start : start + 4] = IMAGE
            labels[row, : start + 4] = -100
    mask[-1, -3:], labels[-1, -3:] = 0, -100
    batch: dict[str, Any] = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    if name == "gemma3":
        batch["token_type_ids"] = (ids == IMAGE).long()
    if name == "qwen_vl":
        batch["mm_token_type_ids"] = (ids == IMAGE).int()
    if total := sum(images):
        noise = partial(torch.randn, generator=generator)
        if name == "qwen_vl":  # 4 x 4 patches of an image, in two frames, which are merged to 2 x 2
            batch["pixel_values"] = noise(16 * total, 3 * 2 * 4 * 4)
            batch["image_grid_thw"] = torch.tensor([[1, 4, 4]] * total)
        else:
            batch["pixel_values"] = noise(total, 3, 8, 8)
    return batch


def truth(name: str, batches: list[dict[str, Any]]) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss over the labels of all batches and its gradients, of the model's own logits in float64."""
    model: Any = tiny(name).double()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        inputs = {key: v.double() if v.is_floating_point() else v for key, v in batch.items() if key != "labels"}
        logits, labels = model(**inputs, use_cache=False).logits[:, :-1], batch["labels"][:, 1:]
        total = total + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count += int((labels != -100).sum())
    loss = total / count
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return relative_error(found, expected)


@pytest.mark.parametrize("images", [[2, 1, 0], [0, 0]], ids=["ragged images", "text alone"])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_are_those_of_the_models_own_logits_in_float64(name, images):
    batch, backbone = batch_of(name, images), tiny(name)
    model = LanguageModel(backbone, LinearCrossEntropyLoss())
    model.prepare(torch.device("cpu"))
    output = model(batch)
    output.loss.backward()
    loss, gradients = truth(name, [batch])
    assert output.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    found = {n: p.grad for n, p in backbone.named_parameters() if p.grad is not None}
    assert errors(found, gradients) <= 1e-5
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
