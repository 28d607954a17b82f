"""Tiny vision-language models of three architectures, and batches of text that follows images."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tiny_models import sharpen
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
        for parameter in model.parameters():  # Of Gemma 3's zeros the next norm would amplify rounding.
            if not parameter.any() and parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.02)
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
