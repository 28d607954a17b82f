"""Train a vision-language model (LLaVA) on pictures and answers: where is the bright square, and what colour has it?

python examples/vision_language.py

You see the share of right answers on new pictures before and after training, and some answers.
"""

from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForImageTextToText, CLIPVisionConfig, LlamaConfig, LlavaConfig, PreTrainedModel

from lit_fused import FusedCausalLMModule

COLOURS, ROWS, COLUMNS = ["red", "green", "blue"], ["top", "middle", "bottom"], ["left", "centre", "right"]
WORDS = ["<pad>", "<start>", "<end>", "<image>", "where?", *COLOURS, *ROWS, *COLUMNS]
PATCHES, SIDE = 9, 4  # 3 x 3 patches of 4 x 4 pixels, each of which becomes a token
PROMPT = ["<start>", *["<image>"] * PATCHES, "where?"]


def numbers(words: list[str]) -> list[int]:
    """Stand in for a processor, which encodes text and makes the tokens that images replace."""
    return [WORDS.index(word) for word in words]


def pictures(count: int, seed: int) -> dict[str, Tensor]:
    """Return noise with one bright square, and the prompt with its answer; loss is wanted on the answer alone."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.3 * torch.randn(count, 3, 3 * SIDE, 3 * SIDE, generator=generator)
    ids = []
    for image, (colour, row, column) in zip(images, torch.randint(3, (count, 3), generator=generator), strict=True):
        image[colour, row * SIDE : (row + 1) * SIDE, column * SIDE : (column + 1) * SIDE] += 1.5
        ids.append(numbers([*PROMPT, COLOURS[colour], ROWS[row], COLUMNS[column], "<end>"]))
    input_ids = torch.tensor(ids)
    labels = input_ids.clone()
    labels[:, : len(PROMPT)] = -100
    return {"input_ids": input_ids, "labels": labels, "pixel_values": images}


def build_model() -> PreTrainedModel:
    """Stand in for lit_fused.from_pretrained("llava-hf/llava-1.5-7b-hf")."""
    sizes: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes["num_attention_heads"] = 4
    vision = CLIPVisionConfig(**sizes, image_size=3 * SIDE, patch_size=SIDE)
    text = LlamaConfig(**sizes, vocab_size=len(WORDS), max_position_embeddings=32, pad_token_id=0)
    parts: dict[str, Any] = {"vision_config": vision, "text_config": text}
    parts |= {"image_token_index": WORDS.index("<image>"), "image_seq_length": PATCHES}
    return AutoModelForImageTextToText.from_config(LlavaConfig(**parts))


@torch.no_grad()
def answers(module: FusedCausalLMModule, batch: dict[str, Tensor]) -> list[str]:
    """Generate an answer for each picture."""
    asked = batch["input_ids"][:, : len(PROMPT)]
    backbone: Any = module.eval().backbone
    said = backbone.generate(
        input_ids=asked,
        attention_mask=torch.ones_like(asked),
        pixel_values=batch["pixel_values"],
        max_new_tokens=3,
        do_sample=False,
        eos_token_id=WORDS.index("<end>"),
        pad_token_id=0,
    )
    module.train()
    return [" ".join(WORDS[word] for word in row) for row in said[:, len(PROMPT) :].tolist()]


def right(module: FusedCausalLMModule, batch: dict[str, Tensor]) -> str:
    """Return the share of answers that are right."""
    expected = [" ".join(WORDS[word] for word in row[-4:-1]) for row in batch["input_ids"].tolist()]
    return f"{sum(a == b for a, b in zip(answers(module, batch), expected, strict=True)) / len(expected):.0%}"


def main() -> None:
    print("pictures with a coloured square, learned in three epochs", flush=True)
    L.seed_everything(0)
    module = FusedCausalLMModule(build_model(), optimizer=partial(AdamW, lr=1e-3))
    new = pictures(100, 2)
    before = right(module, new)
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=3, enable_model_summary=False, **quiet)
    batches: Any = [pictures(32, 10 + n) for n in range(100)]
    trainer.fit(module, DataLoader(batches, batch_size=None))
    print(f"right answers on new pictures: {before} before training, {right(module, new)} after")
    for answer in answers(module, {name: value[:3] for name, value in new.items()}):
        print("where?", answer)


if __name__ == "__main__":
    main()
