"""Share what the pipeline's processes and their one-process truth have in common."""

from functools import partial
from typing import Any

import torch
from tiny_models import VOCABULARY, sharpen, tiny_model
from torch import Tensor
from transformers import get_constant_schedule

from lit_fused import FusedCausalLMModule

SETTINGS: dict[str, Any] = {"max_epochs": 1, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


def ragged() -> list[dict[str, Tensor]]:
    """Five batches: rows and lengths differ, one has padding, one positions, one no valid label."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for index, (rows, length) in enumerate([(3, 12), (2, 12), (5, 9), (1, 7), (4, 12)]):
        ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
        labels = ids.clone()
        labels[:, : (0, 3, length, 5, 8)[index]] = -100
        batches.append({"input_ids": ids, "labels": labels})
    mask = torch.ones_like(batches[0]["input_ids"])
    mask[1, -4:] = 0
    batches[0] |= {"attention_mask": mask, "labels": batches[0]["labels"].masked_fill(mask == 0, -100)}
    packed = torch.cat([torch.arange(5), torch.arange(7)])
    batches[1]["position_ids"] = packed.expand(2, -1)  # two documents in a row
    batches[4]["position_ids"] = packed[None]  # of all rows
    return batches


def module(name: str, loss: Any = None) -> FusedCausalLMModule:
    model = sharpen(tiny_model(name, num_hidden_layers=4), 5.0)
    optimizer = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    return FusedCausalLMModule(model, loss, optimizer, get_constant_schedule)
